"""NVIDIA GPUs as XLA's compiler wants them described: a `GpuTargetConfigProto` in text.

The figures are those that XLA's own descriptions of these GPUs hold; see `hardware.toml`.
"""

import dataclasses
from collections.abc import Mapping, Sequence

from replicax.analysis.hardware import FACTS

CUDNN = (9, 10, 0)
"""The version those descriptions name."""
CUDA = "12.8.0"


@dataclasses.dataclass(frozen=True)
class GpuDescription:
    """What the compiler must know of a GPU beside its memory; sizes in bytes."""

    device_kind: str
    capability: Sequence[int]
    """CUDA's compute capability."""
    multiprocessors: int
    lanes: int
    """float32 units of a multiprocessor."""
    shared_memory: int
    """Of a multiprocessor."""
    shared_memory_of_block: int
    """At most, for a block that asks for it."""
    l2_cache: int
    clock_ghz: float
    memory_bytes_per_second: int
    nvlinks: int
    accelerated_features: bool = False
    """Whether the instructions that only this architecture has may be used (`sm_90a`)."""

    def text(self, memory_bytes: int) -> str:
        """The description for `get_topology_desc(platform="cuda", target_config=...)`.

        Args:
            memory_bytes: of the GPU; see `replicax.analysis.hardware`.
        """
        major, minor = self.capability
        fields = {
            "threads_per_block_limit": 1024,
            "threads_per_warp": 32,
            "threads_per_core_limit": 2048,
            "block_dim_limit_x": 2**31 - 1,
            "block_dim_limit_y": 2**16 - 1,
            "block_dim_limit_z": 2**16 - 1,
            "thread_dim_limit_x": 1024,
            "thread_dim_limit_y": 1024,
            "thread_dim_limit_z": 64,
            "registers_per_core_limit": 2**16,
            "registers_per_block_limit": 2**16,
            "shared_memory_per_block": 48 * 2**10,
            "shared_memory_per_core": self.shared_memory,
            "shared_memory_per_block_optin": self.shared_memory_of_block,
            "core_count": self.multiprocessors,
            "fpus_per_core": self.lanes,
            "memory_bandwidth": self.memory_bytes_per_second,
            "l2_cache_size": self.l2_cache,
            "clock_rate_ghz": self.clock_ghz,
            "device_memory_size": memory_bytes,
        }
        features = "ACCELERATED_FEATURES" if self.accelerated_features else "NONE"
        cudnn = dict(zip(("major", "minor", "patch"), CUDNN, strict=True))
        return f"""\
gpu_device_info {{
  {_lines(fields)}
  cuda_compute_capability {{ major: {major} minor: {minor} feature_extension: {features} }}
  device_interconnect_info {{ active_links: {self.nvlinks} }}
  driver_version: "13.0.0"
  runtime_version: "{CUDA}"
  compile_time_toolkit_version: "{CUDA}"
  dnn_version: "{".".join(map(str, CUDNN))}"
  name: "{self.device_kind}"
}}
platform_name: "CUDA"
dnn_version_info {{ {_lines(cudnn)} }}
device_description_str: "{self.device_kind}"
"""


def _lines(fields: Mapping[str, int | float]) -> str:
    return " ".join(f"{name}: {value}" for name, value in fields.items())


DESCRIPTIONS = {
    name: GpuDescription(**facts["xla"]) for name, facts in FACTS.items() if "xla" in facts
}
"""By the chip's name in `replicax.analysis.hardware`. Older ones (V100) no CUDA 13 compiles for."""
