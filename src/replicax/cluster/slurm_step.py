"""Slurm: detect processes started by srun, and expand its lists of hosts and counts."""

import itertools
import math
import re
from collections.abc import Mapping

from replicax.cluster.variables import COORDINATOR, Detected, Fact, set_integers, whole_number
from replicax.errors import ConfigError
from replicax.net.address import DERIVED_PORTS, FIRST_DERIVED_PORT, join_address

SLURM_ENGINE = "Slurm"
_NOT_BY_SRUN = "in a Slurm allocation but not started by srun"
_HOSTS, _COUNTS = "SLURM_STEP_NODELIST", "SLURM_STEP_TASKS_PER_NODE"
_NEEDED = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", _HOSTS, "SLURM_JOB_ID")
# Slurm's step IDs of salloc's shell and sbatch's script, which srun did not start.
_NOT_SRUN_STEPS = range(2**32 - 16, 2**32)

_COUNT = re.compile(r"(\d+)(?:\(x(\d+)\))?", re.ASCII)
_NUMBERS = r"\d+(?:-\d+)?"
_HOST = re.compile(rf"(?:[^][,\s]+|\[{_NUMBERS}(?:,{_NUMBERS})*\])+", re.ASCII)
_MOST_HOSTS = 100_000


def detect_slurm_step(env: Mapping[str, str]) -> Detected | None:
    """Read the variables of a Slurm step; `None` outside Slurm.

    JAX's own detection reads SLURM_NTASKS, which is also set in a batch script, a single process.
    """
    if "SLURM_JOB_ID" not in env:
        return None
    step = env.get("SLURM_STEP_ID", env.get("SLURM_STEPID", "0"))
    number = int(step) if step.isascii() and step.isdigit() else 0
    if not all(name in env for name in _NEEDED) or number in _NOT_SRUN_STEPS:
        return Detected(
            SLURM_ENGINE, {"process": Fact(0, _NOT_BY_SRUN), "processes": Fact(1, _NOT_BY_SRUN)}
        )
    facts = set_integers(
        env,
        process="SLURM_PROCID",
        processes="SLURM_STEP_NUM_TASKS",
        local_process="SLURM_LOCALID",
    )
    job = whole_number(env["SLURM_JOB_ID"], "SLURM_JOB_ID")
    facts["job"] = Fact(f"{job}.{step}", "SLURM_JOB_ID, SLURM_STEP_ID")
    hosts = expand_hosts(env[_HOSTS], _HOSTS)
    counts = expand_counts(env[_COUNTS], _COUNTS) if _COUNTS in env else []
    if counts and (sum(counts) != facts["processes"].value or len(counts) != len(hosts)):
        return Detected(SLURM_ENGINE, facts, {"coordinator": _one_component(env, hosts, counts)})
    # JAX's port for the first step of a job, and a different one for each further step, which may
    # share the host. A container may be unable to resolve its own host name.
    port = FIRST_DERIVED_PORT + (job + 61 * number) % DERIVED_PORTS
    host, which = (hosts[0], "first") if len(hosts) > 1 else ("127.0.0.1", "only")
    facts["coordinator"] = Fact(join_address(host, port), f"{which} host of {_HOSTS}={env[_HOSTS]}")
    node = whole_number(env["SLURM_NODEID"], "SLURM_NODEID") if "SLURM_NODEID" in env else None
    if counts and (node is not None or len(counts) == 1):
        if node is not None and node >= len(counts):
            raise ConfigError(
                f"SLURM_NODEID={node} and {_COUNTS} has {len(counts)} hosts; "
                f"node IDs range from 0 to {len(counts) - 1}: start all processes with one srun"
            )
        facts["local_processes"] = Fact(counts[node or 0], f"{_COUNTS}, SLURM_NODEID")
    return Detected(SLURM_ENGINE, facts)


def _one_component(env: Mapping[str, str], hosts: list[str], counts: list[int]) -> str:
    """Return an error: the hosts belong to one component of a heterogeneous step."""
    processes = env["SLURM_STEP_NUM_TASKS"]
    if "SLURM_HET_SIZE" in env or "SLURM_PACK_SIZE" in env:
        return (
            f"{_HOSTS}={env[_HOSTS]} does not cover the SLURM_STEP_NUM_TASKS={processes} processes "
            f"of this heterogeneous step; it lists one component: set {COORDINATOR}=HOST:PORT, "
            "with the host of process 0"
        )
    raise ConfigError(
        f"{_COUNTS}={env[_COUNTS]} is {sum(counts)} processes on {len(counts)} hosts, "
        f"SLURM_STEP_NUM_TASKS={processes} and {_HOSTS} has {len(hosts)} hosts; in one step these "
        "must match: start all processes with one srun"
    )


def expand_hosts(text: str, name: str) -> list[str]:
    """Expand a host list such as `node[001-003,7],gpu1` or `rack[0-1]node[0-3]`, in order."""
    hosts: list[str] = []
    for part in map(str.strip, re.split(r",(?![^\[]*\])", text)):
        pieces = re.split(r"[][]", part) if _HOST.fullmatch(part) else []
        # Every other piece is in brackets.
        choices = [_expand_ranges(p) if i % 2 else [p] for i, p in enumerate(pieces)]
        if not pieces or not 0 < math.prod(map(len, choices)) <= _MOST_HOSTS - len(hosts):
            raise ConfigError(
                f"{name}={text!r} is not a list of hosts such as node[001-003,7]; "
                "Slurm sets it: start the processes with srun"
            )
        hosts += map("".join, itertools.product(*choices))
    return hosts


def _expand_ranges(inside: str) -> list[str]:
    """Expand the ranges in brackets; empty if one is descending or too long."""
    numbers: list[str] = []
    for part in inside.split(","):
        first, _, last = part.partition("-")
        if not 0 <= int(last or first) - int(first) < _MOST_HOSTS:
            return []
        # All are padded to the width of the first number: 001-003, 9-11.
        numbers += [f"{n:0{len(first)}d}" for n in range(int(first), int(last or first) + 1)]
    return numbers


def expand_counts(text: str, name: str) -> list[int]:
    """Expand a list of counts: `2(x3),1` is `[2, 2, 2, 1]`."""
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
