"""NVIDIA GPUs as XLA's compiler wants them described: a `GpuTargetConfigProto` in text."""

from replicax.analysis.hardware import FACTS

DESCRIBED = {name: facts["xla"] for name, facts in FACTS.items() if "xla" in facts}
"""The figures of `hardware.toml`, by chip. Older ones (V100) no CUDA 13 compiles for."""
CUDNN = (9, 10, 0)
"""The version that XLA's own descriptions name."""
CUDA = "12.8.0"


def gpu_description(name: str, memory_bytes: int) -> str:
    """Return the description for `get_topology_desc(platform="cuda", target_config=...)`.

    Args:
        name: of a chip in `DESCRIBED`.
        memory_bytes: of the GPU; see `replicax.analysis.hardware`.
    """
    facts = DESCRIBED[name]
    kind, (major, minor) = facts["device_kind"], facts["capability"]
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
        "shared_memory_per_core": facts["shared_memory"],
        "shared_memory_per_block_optin": facts["shared_memory_of_block"],
        "core_count": facts["multiprocessors"],
        "fpus_per_core": facts["lanes"],
        "memory_bandwidth": facts["memory_bytes_per_second"],
        "l2_cache_size": facts["l2_cache"],
        "clock_rate_ghz": facts["clock_ghz"],
        "device_memory_size": memory_bytes,
    }
    info = " ".join(f"{field}: {value}" for field, value in fields.items())
    features = "ACCELERATED_FEATURES" if facts["accelerated_features"] else "NONE"
    return f"""\
gpu_device_info {{
  {info}
  cuda_compute_capability {{ major: {major} minor: {minor} feature_extension: {features} }}
  device_interconnect_info {{ active_links: {facts["nvlinks"]} }}
  driver_version: "13.0.0"
  runtime_version: "{CUDA}"
  compile_time_toolkit_version: "{CUDA}"
  dnn_version: "{".".join(map(str, CUDNN))}"
  name: "{kind}"
}}
platform_name: "CUDA"
dnn_version_info {{ major: {CUDNN[0]} minor: {CUDNN[1]} patch: {CUDNN[2]} }}
device_description_str: "{kind}"
"""
