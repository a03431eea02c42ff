"""One process of a job, as its launcher sees it."""

import contextlib
import dataclasses
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from replicax.cluster.verdict import SAVED

GUARD = Path(__file__).with_name("guard.py")


@dataclasses.dataclass(frozen=True)
class End:
    """How a process ended.

    Args:
        status: its exit code; a signal's number, negative, where one ended it.
        time: in seconds since the epoch.
        forced: the launcher had told it to end before it did.
    """

    status: int
    time: float
    forced: bool

    @property
    def exit_code(self) -> int:
        """As a shell counts: 128 and the signal's number for a signal."""
        return self.status if self.status >= 0 else 128 - self.status

    @property
    def well(self) -> bool:
        """Whether it did what it should: it is done, or stopped with everything saved."""
        return self.status in (0, SAVED)


class Process:
    """A command that runs beside a guard; `guard.py` says what that does.

    Args:
        number: of the process in its job, from 0.
        command: the program and its arguments.
        env: all of its environment.
        cores: those it may use; none means all.
    """

    def __init__(
        self, number: int, command: Sequence[str], env: Mapping[str, str], cores: Sequence[int]
    ) -> None:
        self.number = number
        self.end: End | None = None
        self._pid: int | None = None
        self._told = b""
        self._forced = False
        self._channel, theirs = socket.socketpair()
        with theirs:
            arguments = [str(theirs.fileno()), ",".join(map(str, cores)), *command]
            self._guard = subprocess.Popen(
                [sys.executable, "-I", "-S", str(GUARD), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                env=env,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # a terminal's Ctrl-C comes through the launcher alone
            )
        assert self._guard.stdout
        assert self._guard.stderr
        self.stdout: int = self._guard.stdout.fileno()
        self.stderr: int = self._guard.stderr.fileno()

    @property
    def channel(self) -> int:
        """The descriptor on which the guard tells of the process."""
        return self._channel.fileno()

    def listen(self) -> bool:
        """Take in what the guard tells; False once it has no more to tell, and `end` is known."""
        try:
            told = self._channel.recv(4096)
        except OSError:
            told = b""
        self._told += told
        *lines, self._told = self._told.split(b"\n")
        for line in lines:
            self._note(*line.decode().split())
        if told:
            return True
        if self.end is None:  # the guard was killed; the command dies of that, and its group here
            if self._pid is not None:
                with contextlib.suppress(OSError):
                    os.killpg(self._pid, signal.SIGKILL)
            self.end = End(-signal.SIGKILL, time.time(), self._forced)
        self._guard.wait()
        return False

    def send(self, number: int) -> None:
        """Pass a signal on."""
        with contextlib.suppress(OSError):
            self._channel.send(bytes([number]))

    def stop(self, number: int) -> None:
        """End it with a signal, SIGTERM or SIGKILL."""
        if self.end is None:
            self._forced = True
        self.send(number)

    def close(self) -> None:
        """Let go of what is open; the guard, if it still runs, kills all that is left."""
        self._channel.close()
        self._guard.wait()
        for stream in (self._guard.stdout, self._guard.stderr):
            if stream:
                stream.close()

    def _note(self, kind: str, value: str, at: str = "0") -> None:
        if kind == "pid":
            self._pid = int(value)
        else:
            status = int(value) if kind == "exit" else -int(value)
            self.end = End(status, float(at), self._forced)
