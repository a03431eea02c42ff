"""Compiler options for programs that run only a few times."""

import functools
from typing import Any

from replicax.known_wrong.avoidance import avoiding, knows

_QUICK = {"xla_backend_optimization_level": "0", "xla_cpu_parallel_codegen_split_count": "1"}
_OTHER_EMITTERS = {"xla_cpu_use_fusion_emitters": False}
"""Newer compilers have no others, and no such option."""


def quick_options(platform: str) -> dict[str, Any] | None:
    """Return options that compile in a fourth of the time, to slower code; None if there are none.

    Without LLVM's optimizations, MLIR for every fusion, and many small modules of code.
    """
    return {**_quick(), **avoiding(platform)} if platform == "cpu" else None


@functools.cache
def _quick() -> dict[str, Any]:
    return {**_QUICK, **(_OTHER_EMITTERS if knows("cpu", _OTHER_EMITTERS) else {})}
