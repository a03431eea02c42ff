"""The GPUs visible to a process, found without starting CUDA, and how processes share them."""

import re
import subprocess
from collections.abc import Callable, Mapping, Sequence

from replicax.cluster.differences import processes_text
from replicax.errors import ConfigError
from replicax.text.wording import counted

VISIBLE = "CUDA_VISIBLE_DEVICES"
LIST_SECONDS = 30.0
"""Timeout of `nvidia-smi -L`; without the persistence daemon it takes seconds per GPU."""
_OF_GPUS = {"cuda", "gpu", "rocm"}
_LISTED = re.compile(r"^(\s*)(GPU|MIG)\b.*\(UUID:\s*([^)\s]+)\)", re.MULTILINE)


def list_gpus() -> str:
    """Return the output of `nvidia-smi -L`; `""` if it is not installed or finds no driver."""
    try:
        done = subprocess.run(
            ["nvidia-smi", "-L"], capture_output=True, text=True, timeout=LIST_SECONDS, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise ConfigError(
            f"nvidia-smi -L did not return within {LIST_SECONDS:.0f} s; a GPU driver hangs: "
            "reset or drain this host"
        ) from error
    except OSError:
        return ""
    return done.stdout if done.returncode == 0 else ""


def visible_gpus(
    env: Mapping[str, str],
    list_gpus: Callable[[], str] = list_gpus,
    platforms: str | None = None,
) -> tuple[str, ...]:
    """Return the UUIDs of the GPUs that CUDA will show this process, in CUDA's order.

    None if `platforms`, JAX's setting, excludes GPUs, as on a host where a job runs on CPUs.
    CUDA_VISIBLE_DEVICES is read as CUDA reads it: an entry that matches no GPU ends the list, a
    duplicate entry empties it, and a process sees at most one MIG device. Numbers follow the order
    of nvidia-smi, which CUDA shares on hosts with GPUs of a single model, and everywhere under
    CUDA_DEVICE_ORDER=PCI_BUS_ID.
    """
    if platforms and not _OF_GPUS & set(platforms.split(",")):
        return ()
    entries = env[VISIBLE].split(",") if VISIBLE in env else None
    if entries is not None and not entries[0].strip():
        return ()
    parts_of: dict[str, list[str]] = {}
    for indent, kind, uuid in _LISTED.findall(list_gpus()):
        if kind == "GPU" and not indent:
            parts_of[uuid] = []
        elif kind == "MIG" and parts_of:
            next(reversed(parts_of.values())).append(uuid)
    # CUDA shows the first MIG device of a partitioned GPU.
    shown = {uuid: [*parts, uuid][0] for uuid, parts in parts_of.items()}
    mig_devices = [uuid for parts in parts_of.values() for uuid in parts]
    chosen = list(shown.values()) if entries is None else []
    for entry in entries or ():
        uuid = _find(entry.strip(), shown, mig_devices)
        if uuid is None:
            break
        if uuid in chosen:
            return ()
        chosen.append(uuid)
    # CUDA shows a process one MIG device, and then no full GPU.
    parts = [uuid for uuid in chosen if uuid in mig_devices]
    return tuple(parts[:1] or chosen)


def deal(gpus_of: Sequence[tuple[str, Sequence[str]]]) -> list[tuple[int, ...] | None]:
    """Return the indices of the visible GPUs that each process uses; `None` for all of them.

    Processes on one host that see different GPUs keep them. Processes that see the same GPUs
    share them evenly, in blocks, in rank order. `gpus_of` holds, for every rank in order, its
    host and the UUIDs it sees, in CUDA's order.
    """
    indices_of: list[tuple[int, ...] | None] = [None] * len(gpus_of)
    for host in dict.fromkeys(host for host, _ in gpus_of):
        there = [i for i, (other, _) in enumerate(gpus_of) if other == host]
        gpus_seen = {i: gpus_of[i][1] for i in there}
        if len(there) == 1 or not any(gpus_seen.values()):
            continue
        if all(set(gpus) == set(gpus_seen[there[0]]) for gpus in gpus_seen.values()):
            blocks = _deal_evenly(host, there, list(gpus_seen[there[0]]))
            for process in there:
                # Indices follow each process's own order: the lists may be ordered differently.
                mine = list(gpus_seen[process])
                indices_of[process] = tuple(mine.index(uuid) for uuid in blocks[process])
        else:
            _check_apart(host, gpus_seen)
    return indices_of


def _deal_evenly(host: str, processes: list[int], gpus: list[str]) -> dict[int, list[str]]:
    count = len(processes)
    share, remainder = divmod(len(gpus), count)
    those = f"{processes_text(processes)} on {host} see the same {counted(len(gpus), 'GPU')}"
    if not share:
        raise ConfigError(
            f"{those}, fewer than the {count} processes; each process needs its own GPU: "
            f"start at most {len(gpus)} there, or correct {VISIBLE}"
        )
    if remainder:
        fitting = " or ".join(str(n) for n in range(1, len(gpus) + 1) if len(gpus) % n == 0)
        raise ConfigError(
            f"{those}, which {count} processes cannot share evenly; start {fitting} there, or "
            f"set {VISIBLE} per process"
        )
    return {process: gpus[i * share : (i + 1) * share] for i, process in enumerate(processes)}


def _check_apart(host: str, seen: Mapping[int, Sequence[str]]) -> None:
    """Raise if two processes share a GPU, or if only some processes have one."""
    owner: dict[str, int] = {}
    for process, gpus in seen.items():
        if not gpus:
            other = next(i for i, theirs in seen.items() if theirs)
            raise ConfigError(
                f"process {process} on {host} sees no GPU and process {other} sees "
                f"{counted(len(seen[other]), 'GPU')}; either all processes use GPUs or none: "
                f"correct {VISIBLE}"
            )
        for gpu in gpus:
            if gpu in owner:
                first = owner[gpu]
                raise ConfigError(
                    f"processes {first} and {process} on {host} see {len(seen[first])} and "
                    f"{counted(len(gpus), 'GPU')}, both including {gpu}; processes on one host "
                    f"must see either identical or disjoint sets of GPUs: correct {VISIBLE}"
                )
            owner[gpu] = process


def _find(entry: str, shown: Mapping[str, str], mig_devices: Sequence[str]) -> str | None:
    """Return the UUID that one entry of CUDA_VISIBLE_DEVICES selects, or `None`."""
    if entry.startswith("MIG-"):
        # Older drivers name them MIG-GPU-<uuid>/<instance>/<compute instance>.
        matches = [uuid for uuid in mig_devices if uuid.startswith(entry)]
    elif entry.startswith("GPU-"):
        matches = [device for uuid, device in shown.items() if uuid.startswith(entry)]
    else:
        # CUDA reads the leading digits, as C's strtoul does.
        number = re.match(r"\+?(\d+)", entry, re.ASCII)
        matches = list(shown.values())[int(number[1]) :][:1] if number else []
    return matches[0] if len(matches) == 1 else None
