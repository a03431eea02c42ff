"""Compiler options for programs that run only a few times."""

import importlib.metadata

_QUICK: dict[str, dict[str, str | bool]] = {
    "cpu": {
        "xla_backend_optimization_level": "0",
        "xla_cpu_parallel_codegen_split_count": "1",
    }
}
if importlib.metadata.version("jaxlib").startswith("0.10."):  # since 0.12 it has no other emitters
    _QUICK["cpu"]["xla_cpu_use_fusion_emitters"] = False


def quick_options(platform: str) -> dict[str, str | bool] | None:
    """Return options that compile in a fourth of the time, to slower code; None if there are none.

    Without LLVM's optimizations, MLIR for every fusion, and many small modules of code.
    """
    return _QUICK.get(platform)
