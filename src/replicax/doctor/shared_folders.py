"""Checks that folders are writable, and that all hosts see the same folders."""

import contextlib
import dataclasses
import os
import secrets
import shutil
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from replicax.cluster.differences import processes_text
from replicax.core.ground.job import Job
from replicax.text.checks import FAIL, NOTE, PASS, Check, Verdict

FOLDER = "folder"
LEAST_FREE_BYTES = 10**9
_SEE_SECONDS = 3.0
"""Network file systems show another host's files with a delay."""


@dataclasses.dataclass(frozen=True)
class _Seen:
    """A folder as one process sees it."""

    path: str
    host: str
    exists: bool
    trouble: str | None
    """Why the folder is not writable, or None."""
    free_bytes: int
    sees_token: bool = False


def check_folders(job: Job, named: Sequence[str]) -> list[Check]:
    """Check the working directory, `runs/` and the folders in `named`. All processes must call it.

    Process 0 writes a file with random contents to each, the others look for it, and process 0
    removes it.
    """
    rows = []
    for folder in dict.fromkeys([".", "runs", *named]):
        seen = _look_at(job, Path(folder))
        rows += judge_folder(folder, seen, is_named=folder in named)
    return rows


def judge_folder(folder: str, seen: Sequence[_Seen], *, is_named: bool) -> list[Check]:
    """Return the row of one folder, as each process has `seen` it.

    A folder that the user named must be visible to all processes.
    """
    first = seen[0]
    severe: Verdict = FAIL if is_named or folder == "runs" else NOTE
    text = f"{folder} ({first.path})" if folder != first.path else folder
    figures = {"folder": folder, "processes": [dataclasses.asdict(each) for each in seen]}

    def row(found: str, verdict: Verdict = PASS, fix: str = "") -> list[Check]:
        return [Check(FOLDER, "", verdict, f"{text}: {found}", fix, figures)]

    troubled = [n for n, each in enumerate(seen) if each.trouble]
    if troubled:
        who = "" if len(troubled) == len(seen) else f"{processes_text(troubled)}: "
        reason = seen[troubled[0]].trouble
        return row(f"{who}{reason}", severe, "grant write permission, or use another folder")
    free = min(each.free_bytes for each in seen)
    space = f"{free / 1e9:,.1f} GB free"
    if free < LEAST_FREE_BYTES:
        return row(f"only {space}", NOTE, "free some space, or use another folder")
    if not first.exists:
        return row(f"will be created by the first run; {space}")
    shared, verdict, fix = _sharing(seen, FAIL if is_named else NOTE)
    return row(f"writable, {space}{shared}", verdict, fix)


def _sharing(seen: Sequence[_Seen], severe: Verdict) -> tuple[str, Verdict, str]:
    """Judge whether all processes see the file that process 0 writes."""
    if len(seen) == 1:
        return "", PASS, ""
    hosts = len({each.host for each in seen})
    blind = [n for n, each in enumerate(seen) if not each.sees_token]
    if not blind:
        where = "on this one host" if hosts == 1 else f"on all {hosts} hosts"
        return f", the same for all {len(seen)} processes {where}", PASS, ""
    one = len(blind) == 1
    found = f"; {processes_text(blind)} {'does' if one else 'do'} not see files of process 0"
    other = seen[blind[0]]
    if other.path != seen[0].path:
        return f"{found}: it uses {other.path}", severe, "start all in the same folder"
    return found, severe, "use a folder on a file system that all hosts share"


def _look_at(job: Job, folder: Path) -> list[_Seen]:
    token, contents = None, ""
    try:
        view = _own_view(folder)
        if job.process == 0 and view.exists and not view.trouble:
            with contextlib.suppress(OSError):  # the others wait for the gather in any case
                token, contents = _write_token(folder)
        written = job.gather("the doctor's token", token and [token.name, contents])[0]
        if written:
            name, contents = written
            view = dataclasses.replace(view, sees_token=_sees(folder / name, contents))
        gathered: list[dict[str, Any]] = job.gather("the doctor's folder", dataclasses.asdict(view))
        return [_Seen(**each) for each in gathered]
    finally:
        if token is not None:
            token.unlink(missing_ok=True)


def _own_view(folder: Path) -> _Seen:
    """Return how this process sees `folder`, including any error."""
    host, text = socket.gethostname(), str(folder)
    try:
        path = Path(os.path.abspath(folder))
        text = str(path)
        there = next(each for each in (path, *path.parents) if each.exists())
        if not there.is_dir():
            return _Seen(text, host, False, f"{there} is a file", 0)
        # Permission bits alone do not cover read-only and network file systems.
        _write_token(there)[0].unlink()
        return _Seen(text, host, there == path, None, shutil.disk_usage(there).free)
    except OSError as error:
        return _Seen(text, host, False, f"not writable ({error.strerror})", 0)


def _write_token(folder: Path) -> tuple[Path, str]:
    token, contents = folder / f".replicax-doctor-{secrets.token_hex(8)}", secrets.token_hex(16)
    try:
        token.write_text(contents)
    except OSError:
        with contextlib.suppress(OSError):
            token.unlink()  # the disk is full: the file exists without its contents
        raise
    return token, contents


def _sees(token: Path, contents: str) -> bool:
    deadline = time.monotonic() + _SEE_SECONDS
    while True:
        with contextlib.suppress(OSError):
            if token.read_text() == contents:
                return True
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
