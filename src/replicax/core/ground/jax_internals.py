"""The names that JAX does not publish; no other file imports `jax._src`.

`tests/core/ground/test_jax_internals.py` says what changed when a new JAX has others.
"""

from collections.abc import Callable
from typing import Any

from jax._src import compilation_cache, compiler
from jax._src.clusters import ClusterEnv
from jax._src.compiler import compile_or_get_cached as compile_or_get_cached
from jax._src.compiler import get_compile_options as get_compile_options
from jax._src.hardware_utils import num_available_tpu_chips_and_device_id as tpu_chips
from jax._src.interpreters.pxla import UnloadedMeshExecutable as UnloadedMeshExecutable
from jax._src.lib import hlo, xla_client  # type: ignore[attr-defined]
from jax._src.stages import Compiled as Compiled

__all__ = ["hlo", "tpu_chips", "xla_client"]


def cluster_types() -> list[type[ClusterEnv]]:
    """Return the classes by which JAX detects a job of several processes, also those of plugins."""
    return list(ClusterEnv._cluster_types)


_file_cache = compilation_cache.get_file_cache


def open_cache_as(folder: str, opened: Callable[[], Any]) -> None:
    """Have JAX use what `opened` returns for its persistent cache in `folder`.

    That has two methods: `get(key)` returns bytes or None, and `put(key, bytes)` keeps them.
    """

    def cache(path: str) -> Any:
        return (opened(), path) if path == folder else _file_cache(path)

    compilation_cache.get_file_cache = cache


def cache_own_programs() -> None:
    """Have this process write what it compiles for CPUs to JAX's persistent cache, if that is on.

    JAX writes in process 0 only. On a CPU the others have keys of their own, so they would compile
    everything again in each restart of a job.
    """
    writes = compiler._cache_write

    # `calls`, the program's callbacks to the host, are not passed from jax 0.12 on.
    def write(key: str, seconds: float, name: str, backend: Any, program: Any, *calls: Any) -> None:
        if backend.platform == "cpu" and not any(calls):
            compilation_cache.put_executable_and_time(key, name, program, backend, int(seconds))
        else:
            writes(key, seconds, name, backend, program, *calls)

    compiler._cache_write = write  # type: ignore[assignment]
