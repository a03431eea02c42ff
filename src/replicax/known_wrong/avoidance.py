"""Compiler options that avoid known wrong numbers, in every program that Replicax compiles."""

import functools
from typing import Any

import jax

from replicax.known_wrong.known_table import CompilerOptions, rows_here


def avoiding(platform: str) -> dict[str, Any]:
    """Return the options for programs on the attached devices of `platform`; none for others.

    They follow from versions alone and not from a self-test: programs must be the same in all
    processes of a job, and a self-test has only one of the shapes.
    """
    return dict(_avoiding(platform))


@functools.cache
def _avoiding(platform: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for row in rows_here(platform):
        if row.answer == "avoid" and knows(platform, row.options):
            found |= row.options
    return found


def knows(platform: str, options: CompilerOptions) -> bool:
    """Whether the compiler for the attached devices of `platform` knows these options."""
    device = jax.local_devices(backend=platform)[0]
    with jax.default_device(device):
        lowered = jax.jit(lambda: 0.0).lower()
        try:
            lowered.compile(dict(options))
        except jax.errors.JaxRuntimeError:
            return False
    return True
