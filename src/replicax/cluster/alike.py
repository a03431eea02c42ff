"""Versions, flags and settings whose difference between processes changes results silently."""

import contextlib
import importlib.metadata
import os
import platform
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import jax

_PACKAGES = ("replicax", "jax", "jaxlib", "numpy", "optax", "flax")
_FLAGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
_VARIABLES = ("NVIDIA_TF32_OVERRIDE", "NCCL_ALGO", "NCCL_PROTO")
# Each process may have its own folders, files, ports, devices, memory and logs.
_MAY_DIFFER = re.compile(
    r"dump|_log|profil|_(dir|path|file|port|address|slice_id|to)$|device_count|memory_fraction"
)
_SWITCH = {"": "1", "true": "1", "false": "0"}
# Settings that change which program is compiled, how, or what is done with its results.
_SETTINGS = (
    "jax_allow_f16_reductions",
    "jax_compiler_enable_remat_pass",
    "jax_cpu_collectives_implementation",
    "jax_debug_infs",
    "jax_debug_nans",
    "jax_default_matmul_precision",
    "jax_default_prng_impl",
    "jax_disable_jit",
    "jax_disable_most_optimizations",
    "jax_enable_custom_prng",
    "jax_enable_pgle",
    "jax_enable_recoverability",
    "jax_enable_x64",
    "jax_exec_time_optimization_effort",
    "jax_high_dynamic_range_gumbel",
    "jax_memory_fitting_effort",
    "jax_memory_fitting_level",
    "jax_numpy_dtype_promotion",
    "jax_optimization_level",
    "jax_random_seed_offset",
    "jax_share_binary_between_hosts",
    "jax_softmax_custom_jvp",
    "jax_threefry_gpu_kernel_lowering",
    "jax_threefry_partitionable",
    "jax_use_shardy_partitioner",
)
_VECTORS = re.compile(r"sse\w*|ssse3|avx\w*|fma|f16c|amx\w*|asimd\w*|sve\w*|bf16|i8mm")
_CPU = Path("/proc/cpuinfo")


def compared_environment(env: Mapping[str, str]) -> dict[str, str]:
    """Return the versions, flags and settings of this process, by name."""
    return {**versions(), **compared_settings(env)}


def compared_settings(env: Mapping[str, str]) -> dict[str, str]:
    """Return the flags and settings of this process, by name."""
    variables = {name: env[name] for name in _VARIABLES if name in env}
    flags = {
        f"{name} {flag}": value
        for name in _FLAGS
        for flag, value in parse_flags(env.get(name, "")).items()
        if not _MAY_DIFFER.search(flag)
    }
    own = jax.config.values  # an attribute, if there is one, knows this thread's own value
    settings = {name: str(getattr(jax.config, name, own.get(name))) for name in _SETTINGS}
    return {**variables, **flags, **settings}


def versions() -> dict[str, str]:
    """Return the versions of Python and of the loaded packages that affect results."""
    versions_of = {"python": platform.python_version()}
    for package in _PACKAGES:
        loaded = getattr(sys.modules.get(package), "__version__", None)
        try:
            versions_of[package] = str(loaded or importlib.metadata.version(package))
        except importlib.metadata.PackageNotFoundError:
            versions_of[package] = "not installed"
    return versions_of


def parse_flags(text: str) -> dict[str, str]:
    """Return the flags in `text`, whose last mention counts; a switch is 1 or 0.

    As XLA does, read the file that `text` names if it does not start with a flag.
    """
    if not text.lstrip().startswith("-") and os.path.isfile(text):
        with contextlib.suppress(OSError):
            text = Path(text).read_text(encoding="utf-8", errors="replace")
    try:
        words = shlex.split(text)
    except ValueError:  # a quote that is never closed
        words = text.split()
    flags = (word.partition("=") for word in words)
    return {flag: _SWITCH.get(value.lower(), value) for flag, _, value in flags}


def processor() -> dict[str, str]:
    """Return the model and the vector instructions of the processor that this process runs on."""
    try:
        text = _CPU.read_text(encoding="utf-8", errors="replace")
    except OSError:  # not Linux
        return {"processor": platform.processor() or platform.machine()}
    lines = (line.partition(":") for line in text.splitlines())
    first: dict[str, str] = {}
    for name, _, value in lines:
        first.setdefault(name.strip(), value.strip())
    model = first.get("model name") or first.get("CPU part", platform.machine())
    words = first.get("flags", first.get("Features", "")).split()
    return {"processor": model, "vectors": " ".join(sorted(filter(_VECTORS.fullmatch, words)))}


def beyond_common(processors: Sequence[Mapping[str, str]]) -> list[dict[str, str]]:
    """Return each of `processors` with only those vector instructions that another one lacks."""
    vectors_of = [set(each.get("vectors", "").split()) for each in processors]
    common = set.intersection(*vectors_of)
    return [
        {**each, "vectors": " ".join(sorted(vectors - common)) or "none"}
        for each, vectors in zip(processors, vectors_of, strict=True)
    ]
