"""The lease: it makes one start of a run the only writer of its folder, and detects its loss.

Leases are due to Gray and Cheriton ("Leases", SOSP 1989); the token is what Chubby calls a
sequencer (Burrows, OSDI 2006). Each start has a file in the run's folder `lease`:

00000004-<random>.json      identifies start 4; touched every `RENEW_SECONDS`
00000004-<random>.released  start 4 has released the lease

To acquire the lease, a process writes a file with the next token, lists the folder, and withdraws
if another file has that token or a higher one. A listing shows every file completed before it: if
one start does not see the other's file, that file was written later, and its owner, which lists
even later, sees the first. So at most one of the two sees only itself; if both withdraw, they retry
after random pauses. A frozen start that was presumed dead finds the higher token before committing.
"""

import contextlib
import math
import os
import re
import secrets
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any, TypedDict

from replicax.cluster.same_system import boot, started
from replicax.errors import CheckpointError, RunInUseError
from replicax.train.files.places import (
    make_folder,
    names,
    read_touched,
    remove,
    touch,
    write_whole,
    writing,
)
from replicax.train.files.sealed import sealed, unsealed

RENEW_SECONDS, EXPIRE_SECONDS = 5.0, 30.0
"""Heartbeat interval; time without one after which a start on another host is presumed dead."""
MOST_KEPT = 8
"""Number of starts whose files are kept."""
_LOOK_SECONDS = 0.5
_NAME = re.compile(r"([0-9]{8,})(?:-[0-9a-f]{16})?\.(?:json|released)")


class _Holder(TypedDict, total=False):
    who: str
    host: str
    boot: str | None
    pid: int
    started: int | None


class Lease(contextlib.AbstractContextManager["Lease"]):
    """The lease on a run, from `take_lease`: use it as a context manager, or call `release`."""

    def __init__(self, file: Path, token: int) -> None:
        self.token = token  # the number of this start, from 1
        self._file, self._pid, self._ended = file, os.getpid(), threading.Event()
        threading.Thread(target=self._renew, name="replicax-lease", daemon=True).start()

    def __exit__(self, *_: object) -> None:
        self.release()

    def check(self) -> None:
        """Raise if this start no longer holds the lease; call it right before each commit."""
        try:
            tokens = _tokens(self._file.parent)
        except (FileNotFoundError, NotADirectoryError):
            tokens = {}
        except OSError as error:
            why = f"{self._file.parent} cannot be read ({error.strerror})"
            raise CheckpointError(f"{why}, so the lease cannot be checked; try again") from error
        newest = max(tokens, key=lambda name: tokens[name], default="")
        if tokens.get(newest, 0) > self.token:
            who = _look(self._file.with_name(newest).with_suffix(".json"))[0].get("who", newest)
            raise RunInUseError(f"a newer start ({who}) has taken over the run; this one stops")
        if self._file.name not in tokens:
            raise RunInUseError("the run's folder was removed or replaced; this process stops")
        if self._ended.is_set():
            raise RunInUseError(f"start {self.token} has released its lease; take a new one")

    def release(self) -> None:
        """Release the lease so that the next start need not wait; no-op in a forked child."""
        if self._ended.is_set() or self._pid != os.getpid():
            return
        self._ended.set()  # first, so that the thread touches the file no more
        with contextlib.suppress(OSError):  # then the next start has to wait
            if self._file.name in names(self._file.parent):  # else the folder was replaced
                write_whole(self._file.with_suffix(".released"), b"")

    def _renew(self) -> None:
        while not self._ended.wait(RENEW_SECONDS):
            with contextlib.suppress(OSError):  # `check` reports it
                touch(self._file)


def take_lease(folder: Path, *, by_force: bool = False) -> Lease:
    """Acquire the lease of the run in `folder`, which is created if it does not exist.

    Takes over at once from a killed start on this host; on others, after `EXPIRE_SECONDS`. With
    `by_force` at once from any: the caller knows that its holder must not write any more.
    """
    lease = folder / "lease"
    with writing(folder):
        make_folder(lease)
        while True:
            tokens = _tokens(lease)
            newest = max(tokens.values(), default=0)
            files = [lease / name for name in _unreleased(tokens)]
            files.sort(key=lambda file: "boot" not in _look(file)[0])  # no wait for these
            if by_force or all(_is_dead(file, tokens) for file in files):
                if file := _written(lease, newest + 1):
                    _tidy(lease, newest + 1 - MOST_KEPT)
                    return Lease(file, newest + 1)
                time.sleep(secrets.randbelow(1000) / 10_000)  # random: both have withdrawn


def is_held(folder: Path) -> bool:
    """Whether the run in `folder` has a live holder, or one killed within `EXPIRE_SECONDS`."""
    lease = folder / "lease"
    files = _unreleased(_tokens(lease)) if lease.is_dir() else ()
    return any(time.time() - _look(lease / name)[1] / 1e9 < EXPIRE_SECONDS for name in files)


def last_renewal(folder: Path) -> tuple[str, int] | None:
    """Return what changes whenever the lease of the run in `folder` is renewed; None without."""
    lease = folder / "lease"
    newest = max(_tokens(lease), default=None) if lease.is_dir() else None
    return None if newest is None else (newest, _look(lease / newest)[1])


def _unreleased(tokens: dict[str, int]) -> set[str]:
    """The files of the newest start that were not released."""
    newest = max(tokens.values(), default=0)
    files = {name for name in tokens if tokens[name] == newest and name.endswith(".json")}
    return files - {name.replace(".released", ".json") for name in tokens if ".rel" in name}


def _is_dead(file: Path, tokens: dict[str, int]) -> bool:
    """Return True if its owner is dead, False if `tokens` changed; raise if its owner is alive."""
    holder, _ = first = _look(file)
    if file.name not in names(file.parent):  # withdrawn
        return False
    here, folder = _process(holder.get("pid", 0)), file.parent.parent
    who = holder.get("who", f"start {tokens[file.name]}, host unknown")
    lives = holder == holder | here
    if here["boot"] is None or any(holder.get(key) != here[key] for key in ("host", "boot")):
        print(f"replicax: {who} may use {folder}; waiting {EXPIRE_SECONDS:g} s", file=sys.stderr)
        # Count polls, not seconds: time in which this process was stopped is no evidence.
        for _ in range(math.ceil(EXPIRE_SECONDS / _LOOK_SECONDS)):
            time.sleep(_LOOK_SECONDS)
            if _tokens(file.parent) != tokens:
                return False
            if lives := _look(file) != first:
                break
    if lives:
        if holder.get("pid") == os.getpid() and holder == holder | here:
            raise RunInUseError(
                f"{folder} is in use: an rx.Run of this process is still open in it ({who}); leave "
                "its block, or restart the notebook's kernel"
            )
        why = f"{folder} is in use: another process is already writing to it ({who})"
        raise RunInUseError(f"{why}; wait for it, stop it, or choose another --run")
    return True


def _written(folder: Path, token: int) -> Path | None:
    """Write the file of this process as start `token`; None if another start did so too."""
    here, since = _process(os.getpid()), time.strftime("%Y-%m-%d %H:%M:%S")
    who = f"start {token}, host {here['host']}, pid {here['pid']}, since {since}"
    file = folder / f"{token:08d}-{secrets.token_hex(8)}.json"
    is_alone = False
    try:
        write_whole(file, sealed({"who": who, **here}))
        is_alone = all(each < token for name, each in _tokens(folder).items() if name != file.name)
        return file if is_alone else None
    finally:
        if not is_alone:
            remove(file)


def _tidy(folder: Path, last: int) -> None:
    """Remove the files of starts up to `last`, including partial files of killed ones."""
    with contextlib.suppress(OSError):  # a later start tries again
        for name in names(folder):
            match = _NAME.fullmatch(name.removeprefix("."))
            if match and int(match[1]) <= last:
                remove(folder / name)


def _tokens(folder: Path) -> dict[str, int]:
    """The files of all starts: name -> token."""
    return {match[0]: int(match[1]) for match in map(_NAME.fullmatch, names(folder)) if match}


def _look(file: Path) -> tuple[dict[str, Any], int]:
    """The holder that a file names, empty if it cannot be read; and when it was touched."""
    holder, touched = {}, 0
    with contextlib.suppress(OSError, ValueError):
        data, touched = read_touched(file)
        holder = dict(unsealed(data.rstrip(b" "), _Holder))
    return holder, touched


def _process(pid: int) -> dict[str, Any]:
    """Fields that identify process `pid` uniquely, as far as this host can tell."""
    known = boot() or None
    began = started(pid) if known else None
    return {"host": socket.gethostname(), "boot": known, "pid": pid, "started": began}
