"""Locations of the compilers for described hardware, and why they may be missing."""

import functools
import sys
from importlib.metadata import distributions
from pathlib import Path

import pytest

FOLDER = Path(sys.prefix) / "compilers"
"""Folder that `make compilers` fills; only compilers have it in `PYTHONPATH`."""
PACKAGES = {"tpu": "libtpu", "cuda": "jax-cuda13-plugin"}


def beside_jax(platform: str) -> bool:
    """Return whether the compiler is on the path of JAX, so that no folder can hide it."""
    return _has(sys.path, platform)


def missing_compiler(platform: str) -> str | None:
    """Return why there is no compiler for `platform`."""
    if beside_jax(platform) or _has([str(FOLDER)], platform):
        return None
    return f"{PACKAGES[platform]} not installed (make compilers)"


def needs(platform: str) -> pytest.MarkDecorator:
    """Skips a test where there is no compiler for `platform`."""
    reason = missing_compiler(platform)
    return pytest.mark.skipif(reason is not None, reason=str(reason))


def _has(path: list[str], platform: str) -> bool:
    return PACKAGES[platform] in _names(tuple(path))


@functools.cache
def _names(path: tuple[str, ...]) -> set[str]:
    return {each.name for each in distributions(path=list(path))}
