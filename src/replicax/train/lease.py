"""The lease: by which one start of a run holds its folder, and learns that it no longer does.

A lease is Gray and Cheriton's ("Leases", SOSP 1989), its token what Chubby calls a sequencer
(Burrows, OSDI 2006). On one host the kernel says whether a start lives, by a lock on its file that
ends with the process. Another host's start shows it by touching its file every `RENEW_SECONDS`; one
that stood still, was taken for dead and wakes up finds the higher token before it commits anything.
"""

import contextlib
import math
import os
import threading
import time
from pathlib import Path
from types import TracebackType

from replicax.errors import CheckpointError, ConfigError, RunInUseError
from replicax.train.lease_file import (
    Seen,
    Starts,
    close,
    key_of,
    lease_path,
    look,
    make_folder,
    publish,
    say,
    starts,
)

RENEW_SECONDS = 5.0
"""Between two signs of life of a start."""

EXPIRE_SECONDS = 30.0
"""Without one, and the start of another host counts as dead."""

_LOOK_SECONDS = 0.5
_ENDING_SECONDS = 3.0
"""A killed process keeps its locks until the kernel has freed its memory."""


class Lease:
    """One start's hold on a run. Use it as a context manager, or call `release`.

    A forked child neither renews it nor gives it back.
    """

    def __init__(self, folder: Path, token: int, descriptor: int) -> None:
        self.token = token
        """Counts the starts of a run, from 1."""
        self._folder = folder
        self._descriptor = descriptor
        self._key = key_of(os.fstat(descriptor))
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="replicax-lease", daemon=True)
        self._thread.start()

    def __enter__(self) -> "Lease":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.release()

    def check(self) -> None:
        """Make sure that this start still holds the run: right before anything is committed to it.

        Lists a few names, and opens no file unless the answer is no.

        Raises:
            RunInUseError: a newer start has taken over, or the run's folder is another one.
            CheckpointError: the folder cannot be read, so nobody knows.
        """
        try:
            newest = starts(self._folder).newest
            if newest > self.token:
                raise RunInUseError(f"{self._named(newest)} has taken over; this one stops")
            is_present = self._is_present()
        except (FileNotFoundError, NotADirectoryError):
            is_present = False
        except OSError as error:
            raise CheckpointError(
                f"{self._folder / 'lease'} cannot be read ({error.strerror}), so another start may "
                "have taken the run over; nothing is committed until it can be"
            ) from error
        if not is_present:
            raise RunInUseError(
                "the lease of this run is gone: its folder was removed or replaced; this start "
                "stops"
            )
        if self._ended.is_set():
            raise RunInUseError(f"start {self.token} has given the run back; take a new lease")

    def release(self) -> None:
        """Give the run back, so that the next start need not wait. More than once is fine."""
        if self._ended.is_set() or self._key[0] != os.getpid():
            return
        self._ended.set()
        self._thread.join(timeout=1.0)
        with contextlib.suppress(OSError):  # then the next start finds out by itself
            if self._is_present():  # in another folder of that name the number is another start's
                lease_path(self._folder, self.token).with_suffix(".released").touch(exist_ok=False)
        if not self._thread.is_alive():  # else storage hangs, and the thread needs its descriptor
            close(self._descriptor)

    def _renew(self) -> None:
        while not self._ended.wait(RENEW_SECONDS):
            with contextlib.suppress(OSError):  # `check` tells what comes of it
                os.utime(self._descriptor)

    def _is_present(self) -> bool:
        return key_of(os.lstat(lease_path(self._folder, self.token)))[1:] == self._key[1:]

    def _named(self, token: int) -> str:
        holder = None
        with contextlib.suppress(FileNotFoundError):
            holder = look(self._folder, token).holder
        where = f", on host {holder.host} (pid {holder.pid})," if holder else ""
        return f"start {token} of this run{where}"


def take_lease(folder: Path, *, wait_seconds: float = EXPIRE_SECONDS) -> Lease:
    """Hold the run in `folder`, which is made where it is missing.

    A start on this host that has ended, or was killed, is followed at once.

    Args:
        folder: the run's; the lease's files are in `lease` there.
        wait_seconds: how long the start of another host must show no sign of life.

    Raises:
        RunInUseError: another start holds the run.
        ConfigError: `folder` cannot be written, or `wait_seconds` is too short to tell.
    """
    if not 2 * RENEW_SECONDS <= wait_seconds < math.inf:
        raise ConfigError(
            f"wait_seconds={wait_seconds:g}; a start shows that it lives every "
            f"{RENEW_SECONDS:g} s: wait at least {2 * RENEW_SECONDS:g}"
        )
    try:
        make_folder(folder)
        while True:
            there = starts(folder)
            if there.newest and not there.released:
                _wait_for(folder, there.newest, wait_seconds)
            descriptor = publish(folder, there.newest + 1)
            if descriptor is not None:
                return Lease(folder, there.newest + 1, descriptor)
    except OSError as error:
        raise ConfigError(
            f"{folder} cannot be written ({error.strerror or error}); choose another"
        ) from error


def _wait_for(folder: Path, token: int, wait_seconds: float) -> None:
    """Return once start `token` has ended, or is not the newest; raise where it lives."""
    first = look(folder, token)
    holder = first.holder
    if holder is not None and holder.is_on_this_host:
        if first.is_locked:
            if holder.is_running or not _is_unlocked_soon(folder, token):
                raise _in_use(folder, token, first)
            return
        # A process that lives may have lost its lock by closing another descriptor of the file.
        lives = holder.is_running and holder.pid != os.getpid()
        if first.is_locked is False and not lives:
            return
    where = f"on host {holder.host}" if holder else "on an unknown host"
    say(f"start {token} of {folder}, {where}, may be alive; waiting {wait_seconds:g} s to see")
    # Looks are counted, not seconds: those in which this process itself was stopped tell nothing.
    for _ in range(math.ceil(wait_seconds / _LOOK_SECONDS)):
        time.sleep(_LOOK_SECONDS)
        if starts(folder) != Starts(token, released=False):
            return
        seen = look(folder, token)
        if (seen.touched_ns, seen.holder) != (first.touched_ns, first.holder):
            raise _in_use(folder, token, seen)


def _is_unlocked_soon(folder: Path, token: int) -> bool:
    for _ in range(math.ceil(_ENDING_SECONDS / 0.1)):
        time.sleep(0.1)
        if look(folder, token).is_locked is False:
            return True
    return False


def _in_use(folder: Path, token: int, seen: Seen) -> RunInUseError:
    who = str(seen.holder) if seen.holder else f"start {token}, host unknown"
    return RunInUseError(
        f"{folder} is held by another start of it ({who}): wait for it or stop it, or choose "
        "another --run"
    )
