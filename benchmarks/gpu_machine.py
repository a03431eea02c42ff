"""The first device and the relevant versions: the environment that gpu.py saves."""

import argparse
import datetime
import importlib.metadata
import platform
import subprocess
from typing import Any

import jax
import jax.extend
from gpu_part import answer, options
from torch_peer import torch_version

from replicax.bench.machine import core_count

PACKAGES = (
    "jax",
    "jaxlib",
    "jax-cuda13-plugin",
    "jax-cuda12-plugin",
    "nvidia-cudnn-cu13",
    "nvidia-cudnn-cu12",
    "numpy",
    "optax",
    "flax",
)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    device = jax.devices()[0]
    stats = device.memory_stats() or {}
    limit = stats.get("bytes_limit")
    return {
        "date": datetime.date.today().isoformat(),
        "platform": device.platform,
        "device": device.device_kind,
        "memory_gb": None if limit is None else round(limit / 1e9, 1),
        "driver": driver(),
        "backend": jax.extend.backend.get_backend().platform_version.strip(),
        "cores": core_count(),
        "python": platform.python_version(),
        **{name: found for name in PACKAGES if (found := version(name))},
        "torch": torch_version(args.torch_python),
    }


def version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def driver() -> str | None:
    """Return the version of NVIDIA's driver, or None."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        told = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return None
    return next(iter(told.stdout.split()), None)


if __name__ == "__main__":
    parser = options(__doc__)
    parser.add_argument("--torch-python", required=True, help="an interpreter, possibly with torch")
    answer(measure, parser)
