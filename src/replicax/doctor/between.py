"""Checks that processes share the same packages, environment variables, code and clocks."""

import hashlib
import os
import platform
import re
import statistics
import subprocess
import time
from collections.abc import Mapping, Sequence
from typing import Any

from replicax.cluster.differences import field_differences, processes_text
from replicax.core.ground.job import Job
from replicax.doctor.installation import installed
from replicax.text.checks import FAIL, NOTE, PASS, SKIP, Check, Verdict
from replicax.text.wording import counted

DIFFERENCES = "differences"
CLOCKS = "clocks"
MOST_SECONDS = 1.0
_GIT_SECONDS = 5.0
_ROUNDS = 8
_MATTERS = re.compile(r"(JAX|NCCL|XLA|LIBTPU|TF_XLA|MALLOC)_\w+|LD_LIBRARY_PATH|MALLOC_\w+_")
# Launchers set these per process.
_OF_ONE_PROCESS = re.compile(r"JAX_(PROCESS_ID|LOCAL_DEVICE_IDS|PROCESS_INDEX|VISIBLE_DEVICES)")
_KINDS: tuple[tuple[str, Verdict, str], ...] = (
    ("versions", FAIL, "install the same versions in every process's environment"),
    ("variables", NOTE, "set it to the same value in all processes, or unset it"),
    ("code", FAIL, "run the same code in all processes"),
)

Reading = tuple[float, float]
"""The clock just after a gather, and the duration of that gather; in seconds."""


def check_surroundings(job: Job, env: Mapping[str, str]) -> list[Check]:
    """Check that processes share their environment. All processes must call it."""
    if job.processes == 1:
        return [Check(DIFFERENCES, "", SKIP, "one process: nothing to compare")]
    return judge_surroundings(job.gather("the doctor's surroundings", surroundings(env)))


def surroundings(env: Mapping[str, str]) -> dict[str, Any]:
    """Return the versions, variables and code of this process."""
    variables = {
        name: value
        for name, value in sorted(env.items())
        if _MATTERS.fullmatch(name) and not _OF_ONE_PROCESS.fullmatch(name)
    }
    # Describes the working directory, if it is in a git repository.
    commit = _git("rev-parse", "HEAD").decode().strip() or None
    changes = _git("diff", "HEAD", "--no-ext-diff")
    digest = hashlib.sha256(changes).hexdigest()[:10] if changes else None
    return {
        "versions": {"python": platform.python_version(), **installed()},
        "variables": variables,
        "code": {"the code's git commit": commit, "the uncommitted changes": digest},
    }


def _git(*arguments: str) -> bytes:
    """Return git's output; empty if git is missing or too slow."""
    env = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}
    try:
        done = subprocess.run(
            ["git", *arguments], capture_output=True, timeout=_GIT_SECONDS, check=False, env=env
        )
    except (OSError, subprocess.TimeoutExpired):
        return b""
    return done.stdout if done.returncode == 0 else b""


def judge_surroundings(of_processes: Sequence[Mapping[str, Any]]) -> list[Check]:
    """Return a row per difference, or a single passing row."""
    rows = [
        Check(DIFFERENCES, "", verdict, difference, fix)
        for kind, verdict, fix in _KINDS
        for difference in field_differences([each[kind] for each in of_processes])
    ]
    if rows:
        return rows
    first = dict(of_processes[0])
    variables, commit = first["variables"], first["code"]["the code's git commit"]
    parts = ["versions"]
    if variables:
        parts.append(f"{counted(len(variables), 'variable')} ({', '.join(variables)})")
    if commit:
        changed = " with changes" if first["code"]["the uncommitted changes"] else ""
        parts.append(f"git commit {commit[:10]}{changed}")
    return [Check(DIFFERENCES, "", PASS, f"none in {' · '.join(parts)}", figures=first)]


def check_clocks(job: Job) -> list[Check]:
    """Compare the clocks of all processes with process 0's. All processes must call it."""
    if job.processes == 1:
        return [Check(CLOCKS, "", SKIP, "one process: one clock")]
    reading: Reading = (time.time(), 0.0)
    rounds: list[list[Reading]] = []
    for _ in range(_ROUNDS + 1):
        started = time.monotonic()
        rounds.append([tuple(each) for each in job.gather("the doctor's clocks", reading)])
        reading = (time.time(), time.monotonic() - started)
    return judge_clocks(rounds[1:])  # the first only synchronizes the processes


def judge_clocks(rounds: Sequence[Sequence[Reading]]) -> list[Check]:
    """Estimate each process's clock minus process 0's, to within the shortest round trip.

    In each round, every process read its clock as soon as the previous gather completed.
    """
    ahead, bounds = [0.0], [0.0]
    for process in range(1, len(rounds[0])):
        ahead.append(statistics.median(each[process][0] - each[0][0] for each in rounds))
        bounds.append(min(max(each[process][1], each[0][1]) for each in rounds))
    spread, bound = max(ahead) - min(ahead), max(bounds)
    found = f"within {seconds_text(spread)} of each other, ± {seconds_text(bound)}"
    figures = {"seconds_ahead_of_process_0": ahead, "within_seconds": bounds}
    if spread - bound <= MOST_SECONDS:
        return [Check(CLOCKS, "", PASS, found, figures=figures)]
    middle = statistics.median(ahead)
    off = [n for n, seconds in enumerate(ahead) if abs(seconds - middle) > MOST_SECONDS / 2]
    found += f", {processes_text(off)} farthest off: times in logs and checkpoints are misleading"
    fix = "synchronise the hosts' clocks (chrony, systemd-timesyncd)"
    return [Check(CLOCKS, "", NOTE, found, fix, figures)]


def seconds_text(seconds: float) -> str:
    """Return a text such as `0.25 ms` or `1.5 s`."""
    return f"{seconds:.1f} s" if abs(seconds) >= 1 else f"{1e3 * seconds:.2f} ms"
