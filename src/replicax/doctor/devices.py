"""The devices that JAX computes on, those it leaves alone, and the mesh of them."""

import collections
import dataclasses
import glob
import os
from collections.abc import Mapping, Sequence

import jax

from replicax.cluster.accelerators import VISIBLE, list_gpus
from replicax.core.mesh import make_mesh
from replicax.doctor.row import OK, PROBLEM, WARNING, Row
from replicax.errors import ConfigError

DEVICES = "devices"
MESH = "mesh"
_PLATFORMS = "JAX_PLATFORMS"
_INSTALL = {
    "gpu": "pip install -U 'jax[cuda13]' (driver 580 and newer; 'jax[cuda12]' from 525)",
    "tpu": "pip install -U 'jax[tpu]'",
}


@dataclasses.dataclass(frozen=True)
class Found:
    """The devices of all processes, as JAX tells, and the host around this process."""

    platform: str
    kinds: Sequence[str]
    of_process: Sequence[int]
    """How many each process has."""
    memory_bytes: int | None
    """Of one device, where known."""
    cores: int
    gpus: int
    """That nvidia-smi lists on this host."""
    tpus: int
    """Device files of TPUs on this host."""


def check_devices(env: Mapping[str, str]) -> list[Row]:
    """What JAX found. The first to touch the devices, hence after joining."""
    devices = _devices(env)
    owned = collections.Counter(device.process_index for device in devices)
    found = Found(
        platform=devices[0].platform,
        kinds=list(dict.fromkeys(device.device_kind for device in devices)),
        of_process=[owned[process] for process in range(jax.process_count())],
        memory_bytes=_memory_bytes(jax.local_devices()[0]),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else _cores(),
        gpus=sum(line.startswith("GPU") for line in list_gpus().splitlines()),
        tpus=len(glob.glob("/dev/accel[0-9]*")),
    )
    return judge_devices(found, env)


def judge_devices(found: Found, env: Mapping[str, str]) -> list[Row]:
    """One row with the devices, and one for each thing that is wrong with them."""
    count = sum(found.of_process)
    text = f"{count} {' and '.join(found.kinds)} device{'s' if count > 1 else ''}"
    if len(found.of_process) > 1:
        text += f" of {len(found.of_process)} processes"
    if found.memory_bytes:
        text += f", {found.memory_bytes / 2**30:,.0f} GiB each"
    if found.platform == "cpu":
        own, cores = found.of_process[0], found.cores
        text += f" · {cores} core{'s' if cores > 1 else ''}"
        if own == 1 and cores > 1:
            text += f"; JAX_NUM_CPU_DEVICES={cores} makes more"
    if env.get(_PLATFORMS):
        text += f" · {_PLATFORMS}={env[_PLATFORMS]}"
    rows = [Row(DEVICES, text, OK, figures=dataclasses.asdict(found))]
    if len(set(found.of_process)) > 1:
        rows.append(
            Row(
                DEVICES,
                f"the processes have {', '.join(map(str, found.of_process))} devices; each takes "
                "part with as many",
                PROBLEM,
                f"give all the same number ({VISIBLE}, JAX_NUM_CPU_DEVICES)",
            )
        )
    return rows + _unused(found, env)


def check_mesh() -> list[Row]:
    """The mesh that Replicax makes where nothing else is asked for."""
    mesh = make_mesh()
    shape = {name: int(size) for name, size in mesh.shape.items()}
    split = " x ".join(f"{name} {size}" for name, size in shape.items())
    replicas = f"{shape['data']} replica{'s' if shape['data'] > 1 else ''}"
    return [Row(MESH, f"{split}: {replicas}", OK, figures={"shape": shape})]


def _devices(env: Mapping[str, str]) -> list[jax.Device]:
    try:
        return jax.devices()
    except Exception as error:  # JAX has no type of its own for it, and plugins have theirs
        text = " ".join(f"{type(error).__name__}: {error}".split()).rstrip(": ")
        wanted = env.get(_PLATFORMS)
        if not wanted:
            raise ConfigError(f"JAX finds no devices ({text}): {_INSTALL['gpu']}") from error
        kind = "tpu" if "tpu" in wanted else "gpu"
        raise ConfigError(
            f"JAX finds no devices of {_PLATFORMS}={wanted} ({text}): "
            f"{_INSTALL[kind]}; or unset {_PLATFORMS}"
        ) from error


def _unused(found: Found, env: Mapping[str, str]) -> list[Row]:
    """Accelerators of this host that JAX does not use."""
    if found.platform != "cpu" or not (found.gpus or found.tpus):
        return []
    kind = "GPU" if found.gpus else "TPU"
    count = found.gpus or found.tpus
    there = f"{count} {kind}{'s' if count > 1 else ''} of this host {'are' if count > 1 else 'is'}"
    hidden_by = _PLATFORMS if env.get(_PLATFORMS) else VISIBLE if _hides(env, found) else None
    if hidden_by:
        text = f"{there} not used because of {hidden_by}={env[hidden_by]}"
        return [Row(DEVICES, text, WARNING, f"unset {hidden_by}")]
    text = f"{there} not used by JAX, for which no plugin works"
    platform = "cuda" if found.gpus else "tpu"
    fix = f"{_INSTALL[kind.lower()]}; {_PLATFORMS}={platform} then shows what is still wrong"
    return [Row(DEVICES, text, PROBLEM, fix)]


def _hides(env: Mapping[str, str], found: Found) -> bool:
    return bool(found.gpus) and env.get(VISIBLE, "0").strip() in ("", "-1", "NoDevFiles")


def _memory_bytes(device: jax.Device) -> int | None:
    stats = device.memory_stats()
    return stats.get("bytes_limit") if stats else None


def _cores() -> int:
    return os.cpu_count() or 1
