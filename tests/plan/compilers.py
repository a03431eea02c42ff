"""Where the compilers for described hardware are, and why they cannot be asked."""

import functools
import sys
from importlib.metadata import distributions
from pathlib import Path

import pytest

FOLDER = Path(sys.prefix) / "compilers"
"""What `make compilers` fills; on the path of compilers alone, in `PYTHONPATH`."""
PACKAGES = {"tpu": "libtpu", "cuda": "jax-cuda13-plugin"}


def beside_jax(platform: str) -> bool:
    """Whether the compiler is where jax itself finds it, and no folder can hide it."""
    return _has(sys.path, platform)


def missing_compiler(platform: str) -> str | None:
    """Why there is no compiler for `platform`, in words."""
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
