"""What must be the same around all processes: packages, variables, and the code."""

import hashlib
import os
import platform
import re
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any

from replicax.cluster.differences import differences
from replicax.core.job import Job
from replicax.doctor.row import OK, PROBLEM, SKIPPED, WARNING, Row, Verdict
from replicax.doctor.versions import installed

CHECK = "differences"
_GIT_SECONDS = 5.0
_MATTERS = re.compile(r"(JAX|NCCL|XLA|LIBTPU|TF_XLA|MALLOC)_\w+|LD_LIBRARY_PATH|MALLOC_\w+_")
# Launchers give each process its own.
_OF_ONE_PROCESS = re.compile(r"JAX_(PROCESS_ID|LOCAL_DEVICE_IDS|PROCESS_INDEX|VISIBLE_DEVICES)")


def check_surroundings(job: Job, env: Mapping[str, str]) -> list[Row]:
    """What differs between the processes that should not. All processes call it."""
    if job.processes == 1:
        return [Row(CHECK, "one process: nothing to compare", SKIPPED)]
    return judge_surroundings(job.gather("the doctor's surroundings", surroundings(env)))


def surroundings(env: Mapping[str, str]) -> dict[str, Any]:
    """Versions, variables and code of this process."""
    variables = {
        name: value
        for name, value in sorted(env.items())
        if _MATTERS.fullmatch(name) and not _OF_ONE_PROCESS.fullmatch(name)
    }
    return {
        "versions": {"python": platform.python_version(), **installed()},
        "variables": variables,
        "code": {"the code's git commit": _commit(), "the uncommitted changes": _changes()},
    }


def judge_surroundings(of_processes: Sequence[Mapping[str, Any]]) -> list[Row]:
    """A row for each difference, or one that there is none."""
    rows = []
    kinds: tuple[tuple[str, Verdict, str], ...] = (
        ("versions", PROBLEM, "install the same in every process's environment"),
        ("variables", WARNING, "set it alike for all processes, or unset it"),
        ("code", PROBLEM, "give all processes the same code"),
    )
    for kind, verdict, fix in kinds:
        rows += [
            Row(CHECK, difference, verdict, fix)
            for difference in differences([each[kind] for each in of_processes])
        ]
    if rows:
        return rows
    return [Row(CHECK, _same(of_processes[0]), OK, figures=dict(of_processes[0]))]


def _same(first: Mapping[str, Any]) -> str:
    variables, commit = first["variables"], first["code"]["the code's git commit"]
    parts = ["versions"]
    if variables:
        plural = "s" if len(variables) > 1 else ""
        parts.append(f"{len(variables)} variable{plural} ({', '.join(variables)})")
    if commit:
        changed = " with changes" if first["code"]["the uncommitted changes"] else ""
        parts.append(f"git commit {commit[:10]}{changed}")
    return f"none in {' · '.join(parts)}"


def _commit() -> str | None:
    """Of the working directory, where that belongs to a git repository."""
    said = _git("rev-parse", "HEAD")
    return said.decode().strip() or None if said else None


def _changes() -> str | None:
    """A digest of what the working directory's repository has beside its commit, if anything."""
    changes = _git("diff", "HEAD", "--no-ext-diff")
    return hashlib.sha256(changes).hexdigest()[:10] if changes else None


def _git(*arguments: str) -> bytes:
    """What git says; nothing where it is not there, or takes long."""
    env = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}
    try:
        done = subprocess.run(
            ["git", *arguments], capture_output=True, timeout=_GIT_SECONDS, check=False, env=env
        )
    except (OSError, subprocess.TimeoutExpired):
        return b""
    return done.stdout if done.returncode == 0 else b""
