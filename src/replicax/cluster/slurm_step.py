"""Slurm: processes that srun started, and its compressed lists of hosts and counts."""

import itertools
import math
import re
from collections.abc import Mapping

from replicax.cluster.address import DERIVED_PORTS, FIRST_DERIVED_PORT, join_address
from replicax.cluster.detected import Detected, said, whole_number
from replicax.cluster.variables import COORDINATOR
from replicax.errors import ConfigError

ENGINE = "Slurm"
NOT_BY_SRUN = "in a Slurm allocation but not started by srun"
_NEEDED = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NODELIST", "SLURM_JOB_ID")
# Slurm's ids of the steps that hold salloc's shell and sbatch's script: no srun started those.
_NOT_SRUN_STEPS = range(2**32 - 16, 2**32)

_COUNT = re.compile(r"(\d+)(?:\(x(\d+)\))?", re.ASCII)
_RANGE = re.compile(r"(\d+)(?:-(\d+))?", re.ASCII)
_BRACKETS = re.compile(r"\[([^\[\]]*)\]")
_MOST_HOSTS = 100_000


def detect(env: Mapping[str, str]) -> Detected | None:
    """The place in a Slurm step, or `None` outside Slurm.

    SLURM_NTASKS is not read: in a batch script it is set while there is one process.

    Raises:
        ConfigError: variables of the step that contradict each other.
    """
    if "SLURM_JOB_ID" not in env:
        return None
    if not _is_in_srun_step(env):
        reasons = {"process": NOT_BY_SRUN, "processes": NOT_BY_SRUN}
        return Detected(ENGINE, 0, 1, reasons=reasons)
    process = whole_number(env, "SLURM_PROCID")
    processes = whole_number(env, "SLURM_STEP_NUM_TASKS", least=1)
    job = f"{env['SLURM_JOB_ID']}.{_step(env)}"
    reasons = {
        "process": said(env, "SLURM_PROCID"),
        "processes": said(env, "SLURM_STEP_NUM_TASKS"),
        "job": "SLURM_JOB_ID, SLURM_STEP_ID",
    }
    hosts = expand_hosts(env["SLURM_STEP_NODELIST"], "SLURM_STEP_NODELIST")
    counts = _counts(env)
    lacks: dict[str, str] = {}
    coordinator = None
    if _is_one_component(env, hosts, counts, processes):
        counts = None
        lacks["coordinator"] = (
            f"SLURM_STEP_NODELIST={env['SLURM_STEP_NODELIST']} has not the "
            f"SLURM_STEP_NUM_TASKS={processes} processes of this heterogeneous step; it lists one "
            f"component: set {COORDINATOR}=HOST:PORT, with the host of process 0"
        )
    else:
        coordinator, reasons["coordinator"] = _coordinator(env, hosts)
    reasons["local_process"] = "SLURM_LOCALID"
    reasons["local_processes"] = "SLURM_STEP_TASKS_PER_NODE, SLURM_NODEID"
    return Detected(
        ENGINE,
        process,
        processes,
        coordinator=coordinator,
        job=job,
        local_process=whole_number(env, "SLURM_LOCALID") if "SLURM_LOCALID" in env else None,
        local_processes=_local_processes(env, counts),
        reasons=reasons,
        lacks=lacks,
    )


def _coordinator(env: Mapping[str, str], hosts: list[str]) -> tuple[str, str]:
    """The address and what decided it."""
    told_by = f"host of SLURM_STEP_NODELIST={env['SLURM_STEP_NODELIST']}"
    if len(hosts) == 1:
        # A container may be unable to resolve the name of its own host.
        return join_address("127.0.0.1", _port(env)), f"only {told_by}"
    return join_address(hosts[0], _port(env)), f"first {told_by}"


def _is_in_srun_step(env: Mapping[str, str]) -> bool:
    step = _step(env)
    return all(name in env for name in _NEEDED) and not (
        step.isdigit() and int(step) in _NOT_SRUN_STEPS
    )


def _step(env: Mapping[str, str]) -> str:
    return env.get("SLURM_STEP_ID", env.get("SLURM_STEPID", "0"))


def _port(env: Mapping[str, str]) -> int:
    """JAX's port for the first step of a job, and another for each further step."""
    job = whole_number(env, "SLURM_JOB_ID")
    step = _step(env)
    # Two steps of one job may share a host at the same time.
    apart = 61 * int(step) if step.isascii() and step.isdigit() else 0
    return FIRST_DERIVED_PORT + (job + apart) % DERIVED_PORTS


def _counts(env: Mapping[str, str]) -> list[int] | None:
    name = "SLURM_STEP_TASKS_PER_NODE"
    return expand_counts(env[name], name) if name in env else None


def _is_one_component(
    env: Mapping[str, str], hosts: list[str], counts: list[int] | None, processes: int
) -> bool:
    """Whether the hosts are those of one component of a heterogeneous step, not of the step.

    Raises:
        ConfigError: the hosts and counts of an ordinary step disagree.
    """
    if counts is None or (sum(counts) == processes and len(counts) == len(hosts)):
        return False
    if "SLURM_HET_SIZE" in env or "SLURM_PACK_SIZE" in env:
        return True
    raise ConfigError(
        f"SLURM_STEP_TASKS_PER_NODE={env['SLURM_STEP_TASKS_PER_NODE']} is {sum(counts)} processes "
        f"on {len(counts)} hosts, SLURM_STEP_NUM_TASKS={processes} and SLURM_STEP_NODELIST has "
        f"{len(hosts)} hosts; one step has one number of each: start all with one srun"
    )


def _local_processes(env: Mapping[str, str], counts: list[int] | None) -> int | None:
    if counts is None or "SLURM_NODEID" not in env:
        return counts[0] if counts and len(counts) == 1 else None
    node = whole_number(env, "SLURM_NODEID")
    if node >= len(counts):
        raise ConfigError(
            f"SLURM_NODEID={node} and SLURM_STEP_TASKS_PER_NODE has {len(counts)} hosts; "
            f"hosts count from 0 to {len(counts) - 1}: start every process with one srun"
        )
    return counts[node]


def expand_hosts(text: str, name: str) -> list[str]:
    """Every host of a Slurm host list, in order.

    Args:
        text: as in `node[001-003,7],gpu1` or `rack[0-1]node[0-3]`.
        name: the variable it came from, for the message.

    Raises:
        ConfigError: brackets or ranges that do not parse.
    """
    hosts: list[str] = []
    for part in _split_outside_brackets(text, name):
        pieces = _BRACKETS.split(part)
        if any("[" in piece or "]" in piece or not piece.isprintable() for piece in pieces):
            raise _not_a_list(text, name)
        # re.split alternates plain text and what stood in brackets.
        choices = [
            _expand_ranges(piece, text, name) if i % 2 else [piece]
            for i, piece in enumerate(pieces)
        ]
        if len(hosts) + math.prod(map(len, choices)) > _MOST_HOSTS:
            raise _not_a_list(text, name)
        hosts += ["".join(combination) for combination in itertools.product(*choices)]
    return hosts


def expand_counts(text: str, name: str) -> list[int]:
    """Every count of a Slurm list of counts: `2(x3),1` is `[2, 2, 2, 1]`.

    Args:
        text: the list.
        name: the variable it came from, for the message.

    Raises:
        ConfigError: an entry that is not a count.
    """
    counts: list[int] = []
    for part in text.split(","):
        match = _COUNT.fullmatch(part.strip())
        if match is None or int(match[2] or 1) > _MOST_HOSTS:
            raise ConfigError(
                f"{name}={text!r} is not a list of counts such as 2(x3),1; "
                "Slurm sets it: start the processes with srun"
            )
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def _split_outside_brackets(text: str, name: str) -> list[str]:
    parts = re.split(r",(?![^\[]*\])", text)
    if not all(part.strip() for part in parts):
        raise _not_a_list(text, name)
    return [part.strip() for part in parts]


def _expand_ranges(inside: str, text: str, name: str) -> list[str]:
    numbers: list[str] = []
    for part in inside.split(","):
        match = _RANGE.fullmatch(part)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if match is None or last < first or last - first > _MOST_HOSTS:
            raise _not_a_list(text, name)
        # The width of the first number holds for all: 001-003, 9-11.
        numbers += [f"{number:0{len(match[1])}d}" for number in range(first, last + 1)]
    return numbers


def _not_a_list(text: str, name: str) -> ConfigError:
    return ConfigError(
        f"{name}={text!r} is not a list of hosts such as node[001-003,7]; "
        "Slurm sets it: start the processes with srun"
    )
