"""Which GPUs a process sees, told without starting CUDA, and which of them each process takes."""

import re
import subprocess
from collections.abc import Callable, Mapping, Sequence

from replicax.cluster.differences import processes_text
from replicax.errors import ConfigError

VISIBLE = "CUDA_VISIBLE_DEVICES"
LIST_SECONDS = 30.0
"""How long `nvidia-smi -L` may take; without its persistence daemon, seconds for each GPU."""
_LISTED = re.compile(r"^(\s*)(GPU|MIG)\b.*\(UUID:\s*([^)\s]+)\)", re.MULTILINE)


def list_gpus() -> str:
    """Return the output of `nvidia-smi -L`; `""` where it is not installed or finds no driver."""
    try:
        done = subprocess.run(
            ["nvidia-smi", "-L"], capture_output=True, text=True, timeout=LIST_SECONDS, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise ConfigError(
            f"nvidia-smi -L did not answer in {LIST_SECONDS:.0f} s; the driver of a GPU hangs: "
            "reset or drain this host"
        ) from error
    except OSError:
        return ""
    return done.stdout if done.returncode == 0 else ""


def visible_gpus(
    env: Mapping[str, str], list_gpus: Callable[[], str] = list_gpus
) -> tuple[str, ...]:
    """UUIDs of the GPUs that CUDA will show this process, in CUDA's order.

    CUDA_VISIBLE_DEVICES is read as CUDA reads it: an entry that fits no GPU ends the list, one
    given twice empties it, and of MIG devices a process sees one. Numbers count as nvidia-smi
    does, which CUDA shares on hosts whose GPUs are all of one model, and everywhere under
    CUDA_DEVICE_ORDER=PCI_BUS_ID.
    """
    entries = env[VISIBLE].split(",") if VISIBLE in env else None
    if entries is not None and not entries[0].strip():
        return ()
    parts_of: dict[str, list[str]] = {}
    for indent, kind, uuid in _LISTED.findall(list_gpus()):
        if kind == "GPU" and not indent:
            parts_of[uuid] = []
        elif kind == "MIG" and parts_of:
            next(reversed(parts_of.values())).append(uuid)
    # CUDA shows the first MIG device of a GPU that is divided.
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
    # CUDA shows one MIG device to a process, and no whole GPU beside it.
    parts = [uuid for uuid in chosen if uuid in mig_devices]
    return tuple(parts[:1] or chosen)


def deal(gpus_of: Sequence[tuple[str, Sequence[str]]]) -> list[tuple[int, ...] | None]:
    """Which of its visible GPUs each process takes; `None` for all of them.

    Processes of one host that see different GPUs keep what they see. Those that see the same
    ones share them evenly, in blocks, in the order of the processes. `gpus_of` has, for every
    process in order, its host and the UUIDs it sees, in CUDA's order.
    """
    taken: list[tuple[int, ...] | None] = [None] * len(gpus_of)
    for host in dict.fromkeys(host for host, _ in gpus_of):
        there = [i for i, (other, _) in enumerate(gpus_of) if other == host]
        seen = {i: gpus_of[i][1] for i in there}
        if len(there) == 1 or not any(seen.values()):
            continue
        if all(set(gpus) == set(seen[there[0]]) for gpus in seen.values()):
            blocks = _deal_evenly(host, there, list(seen[there[0]]))
            for process in there:
                # Each names its share by its own order, should the lists be in different ones.
                mine = list(seen[process])
                taken[process] = tuple(mine.index(uuid) for uuid in blocks[process])
        else:
            _check_apart(host, seen)
    return taken


def _deal_evenly(host: str, processes: list[int], gpus: list[str]) -> dict[int, list[str]]:
    """Process -> its block of `gpus`."""
    count = len(processes)
    each, left = divmod(len(gpus), count)
    those = f"{processes_text(processes)} on {host} see the same {_count(gpus)}"
    if not each:
        raise ConfigError(
            f"{those}, fewer than the {count} processes; each needs one of its own: "
            f"start at most {len(gpus)} there, or correct {VISIBLE}"
        )
    if left:
        fitting = " or ".join(str(n) for n in range(1, len(gpus) + 1) if len(gpus) % n == 0)
        raise ConfigError(
            f"{those}, which {count} processes cannot share evenly; start {fitting} there, or "
            f"give each its own {VISIBLE}"
        )
    return {process: gpus[i * each : (i + 1) * each] for i, process in enumerate(processes)}


def _check_apart(host: str, seen: Mapping[int, Sequence[str]]) -> None:
    """Raise where two processes share a GPU, or one has none while others do."""
    owner: dict[str, int] = {}
    for process, gpus in seen.items():
        if not gpus:
            other = next(i for i, theirs in seen.items() if theirs)
            raise ConfigError(
                f"process {process} on {host} sees no GPU and process {other} sees "
                f"{_count(seen[other])}; all processes run on GPUs or none: correct {VISIBLE}"
            )
        for gpu in gpus:
            if gpu in owner:
                first = owner[gpu]
                raise ConfigError(
                    f"processes {first} and {process} on {host} see {len(seen[first])} and "
                    f"{_count(gpus)}, {gpu} among both; processes of one host see all the same "
                    f"GPUs or none in common: correct {VISIBLE}"
                )
            owner[gpu] = process


def _find(entry: str, shown: Mapping[str, str], mig_devices: Sequence[str]) -> str | None:
    """The UUID that one entry of CUDA_VISIBLE_DEVICES means, or `None` for none."""
    if entry.startswith("MIG-"):
        # Older drivers list and take them as MIG-GPU-<uuid>/<instance>/<compute instance>.
        found = [uuid for uuid in mig_devices if uuid.startswith(entry)]
    elif entry.startswith("GPU-"):
        found = [device for uuid, device in shown.items() if uuid.startswith(entry)]
    else:
        # CUDA reads the leading digits, as C's strtoul does.
        number = re.match(r"\+?(\d+)", entry, re.ASCII)
        found = list(shown.values())[int(number[1]) :][:1] if number else []
    return found[0] if len(found) == 1 else None


def _count(gpus: Sequence[str]) -> str:
    return f"{len(gpus)} GPU" + ("" if len(gpus) == 1 else "s")
