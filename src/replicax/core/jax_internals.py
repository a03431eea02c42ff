"""The names that JAX does not publish; no other file imports `jax._src`.

`tests/core/test_jax_internals.py` says what changed when a new JAX has others.
"""

from jax._src.compiler import compile_or_get_cached as compile_or_get_cached
from jax._src.compiler import get_compile_options as get_compile_options
from jax._src.hardware_utils import num_available_tpu_chips_and_device_id as tpu_chips
from jax._src.interpreters.pxla import UnloadedMeshExecutable as UnloadedMeshExecutable
from jax._src.lib import hlo, xla_client  # type: ignore[attr-defined]
from jax._src.stages import Compiled as Compiled

__all__ = ["hlo", "tpu_chips", "xla_client"]
