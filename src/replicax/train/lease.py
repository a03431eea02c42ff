"""The lease: by which one start of a run holds its folder, and learns that it no longer does.

A lease is Gray and Cheriton's ("Leases", SOSP 1989), its token what Chubby calls a sequencer
(Burrows, OSDI 2006). Each start has a file in the run's folder `lease`:

00000004-<random>.json      who start 4 is; touched every `RENEW_SECONDS`
00000004-<random>.released  it has given the run back

Whoever takes a run writes a file with the next token, then lists the folder, and withdraws where
another file has that token or a higher one. A list shows every file that was whole before it: if
one start does not see the other's, that was written later, and its start, which lists later still,
sees the first. So at most one of two sees only itself; where both withdraw they begin again after
random pauses. A frozen start, taken for dead, finds the higher token before it commits anything.
"""

import contextlib
import json
import math
import os
import re
import secrets
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

from replicax.errors import CheckpointError, RunInUseError
from replicax.train.places import (
    make_folder,
    names,
    read_touched,
    remove,
    touch,
    write_whole,
    writing,
)

RENEW_SECONDS, EXPIRE_SECONDS = 5.0, 30.0
"""Between two heartbeats; and without one, until the start of another host counts as dead."""
MOST_KEPT = 8
"""Starts whose files are kept."""
_LOOK_SECONDS = 0.5
_EXITING = 0x4  # PF_EXITING of Linux's sched.h: of a killed process that still frees its memory
_NAME = re.compile(r"([0-9]{8,})(?:-[0-9a-f]{16})?\.(?:json|released)")


class Lease(contextlib.AbstractContextManager["Lease"]):
    """One start's hold on a run, made by `take_lease`: a context manager, or call `release`."""

    def __init__(self, file: Path, token: int) -> None:
        self.token = token  # which start of the run it is, from 1
        self._file, self._pid, self._ended = file, os.getpid(), threading.Event()
        threading.Thread(target=self._renew, name="replicax-lease", daemon=True).start()

    def __exit__(self, *_: object) -> None:
        self.release()

    def check(self) -> None:
        """Make sure that this start still holds the run, right before anything is committed."""
        try:
            tokens = _tokens(self._file.parent)
        except (FileNotFoundError, NotADirectoryError):
            tokens = {}
        except OSError as error:
            why = f"{self._file.parent} cannot be read ({error.strerror})"
            raise CheckpointError(f"{why}, so nobody knows whose it is; try again") from error
        newest = max(tokens, key=lambda name: tokens[name], default="")
        if tokens.get(newest, 0) > self.token:
            who = _look(self._file.with_name(newest).with_suffix(".json"))[0].get("who", newest)
            raise RunInUseError(f"a newer start ({who}) has taken the run over; this one stops")
        if self._file.name not in tokens:
            raise RunInUseError("the run's folder was removed or replaced; this start of it stops")
        if self._ended.is_set():
            raise RunInUseError(f"start {self.token} has given the run back; take a new lease")

    def release(self) -> None:
        """Give the run back, so that the next start need not wait. A forked child gives nothing."""
        if self._ended.is_set() or self._pid != os.getpid():
            return
        self._ended.set()
        with contextlib.suppress(OSError):  # then the next start finds out by itself
            if self._file.name in names(self._file.parent):  # else the folder is another one
                write_whole(self._file.with_suffix(".released"), b"")

    def _renew(self) -> None:
        while not self._ended.wait(RENEW_SECONDS):
            with contextlib.suppress(OSError):  # `check` tells what comes of it
                touch(self._file)


def take_lease(folder: Path) -> Lease:
    """Hold the run in `folder`, which is made where it is missing.

    A start on this host that was killed is followed at once, another's after `EXPIRE_SECONDS`.
    """
    lease = folder / "lease"
    with writing(folder):
        make_folder(lease)
        while True:
            tokens = _tokens(lease)
            newest = max(tokens.values(), default=0)
            files = [lease / name for name in _unreleased(tokens)]
            files.sort(key=lambda file: "boot" not in _look(file)[0])  # known hosts answer at once
            if all(_is_dead(file, tokens) for file in files):
                if file := _written(lease, newest + 1):
                    _tidy(lease, newest + 1 - MOST_KEPT)
                    return Lease(file, newest + 1)
                time.sleep(secrets.randbelow(1000) / 10_000)


def is_held(folder: Path) -> bool:
    """Whether a start holds the run in `folder`, or was killed within `EXPIRE_SECONDS`."""
    lease = folder / "lease"
    files = _unreleased(_tokens(lease)) if lease.is_dir() else ()
    return any(time.time() - _look(lease / name)[1] / 1e9 < EXPIRE_SECONDS for name in files)


def _unreleased(tokens: dict[str, int]) -> set[str]:
    """The files of the newest start that have no mark of release."""
    newest = max(tokens.values(), default=0)
    files = {name for name in tokens if tokens[name] == newest and name.endswith(".json")}
    return files - {name.replace(".released", ".json") for name in tokens if ".rel" in name}


def _is_dead(file: Path, tokens: dict[str, int]) -> bool:
    """Return True where its start is, False where `tokens` are others now; raise where it lives."""
    holder, _ = first = _look(file)
    if file.name not in names(file.parent):  # withdrawn
        return False
    here, folder = _process(holder.get("pid", 0)), file.parent.parent
    who = holder.get("who", f"start {tokens[file.name]}, host unknown")
    lives = holder == holder | here
    if here["boot"] is None or any(holder.get(key) != here[key] for key in ("host", "boot")):
        print(f"replicax: {who} may hold {folder}; waiting {EXPIRE_SECONDS:g} s", file=sys.stderr)
        # Looks are counted, not seconds: those in which this process was stopped tell nothing.
        for _ in range(math.ceil(EXPIRE_SECONDS / _LOOK_SECONDS)):
            time.sleep(_LOOK_SECONDS)
            if _tokens(file.parent) != tokens:
                return False
            if lives := _look(file) != first:
                break
    if lives:
        why = f"{folder} is held by another start of it ({who})"
        raise RunInUseError(f"{why}: wait for it or stop it, or choose another --run")
    return True


def _written(folder: Path, token: int) -> Path | None:
    """The file of this process as start `token`; None where another start is there as well."""
    here, since = _process(os.getpid()), time.strftime("%Y-%m-%d %H:%M:%S")
    who = f"start {token}, host {here['host']}, pid {here['pid']}, since {since}"
    file = folder / f"{token:08d}-{secrets.token_hex(8)}.json"
    is_alone = False
    try:
        write_whole(file, json.dumps({"who": who, **here}).encode())
        is_alone = all(each < token for name, each in _tokens(folder).items() if name != file.name)
        return file if is_alone else None
    finally:
        if not is_alone:
            remove(file)


def _tidy(folder: Path, last: int) -> None:
    """Remove what starts up to `last` left, half files of killed ones included."""
    with contextlib.suppress(OSError):
        for name in names(folder):
            found = _NAME.fullmatch(name.removeprefix("."))
            if found and int(found[1]) <= last:
                remove(folder / name)


def _tokens(folder: Path) -> dict[str, int]:
    """Name -> token of each file of a start."""
    return {found[0]: int(found[1]) for found in map(_NAME.fullmatch, names(folder)) if found}


def _look(file: Path) -> tuple[dict[str, Any], int]:
    """Who a file names, where it can be read; and when it was touched."""
    holder, touched = {}, 0
    with contextlib.suppress(OSError, ValueError):
        data, touched = read_touched(file)
        holder = json.loads(data)
    return holder, touched


def _process(pid: int) -> dict[str, Any]:
    """A text that tells process `pid` from all others, as far as this host knows."""
    boot = started = None
    with contextlib.suppress(OSError):
        Path("/proc/1/stat").read_bytes()  # else the processes of others are hidden
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        boot += f" {os.readlink('/proc/self/ns/pid')}"  # a container counts its own
        # From proc(5). The command before the bracket may itself hold brackets and blanks.
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        if fields[0] not in (b"Z", b"X") and not int(fields[6]) & _EXITING:
            started = int(fields[19])  # clock ticks after the boot, as process ids come again
    return {"host": socket.gethostname(), "boot": boot, "pid": pid, "started": started}
