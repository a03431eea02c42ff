"""The names that JAX does not publish; no other file imports `jax._src`.

`tests/core/test_jax_internals.py` compares each with what Replicax takes for granted.
"""

from jax._src.compiler import compile_or_get_cached, get_compile_options
from jax._src.hardware_utils import num_available_tpu_chips_and_device_id
from jax._src.interpreters.pxla import UnloadedMeshExecutable
from jax._src.lib import hlo, xla_client  # type: ignore[attr-defined]
from jax._src.stages import Compiled

HloPrintOptions, DeviceList = hlo.HloPrintOptions, xla_client.DeviceList

__all__ = [
    "Compiled",
    "DeviceList",
    "HloPrintOptions",
    "UnloadedMeshExecutable",
    "compile_or_get_cached",
    "get_compile_options",
    "num_available_tpu_chips_and_device_id",
]
