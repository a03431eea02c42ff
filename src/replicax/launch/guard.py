"""A guard for each process: even if the launcher is killed, nothing is left running.

It is a separate program, run by path with `python -I -S` so that it starts in milliseconds:

    guard.py SOCKET CORES COMMAND ...

SOCKET is a descriptor whose other end only the launcher has. Received bytes are signals to forward;
when it closes, the launcher is gone, and everything below the guard is killed. The guard replies in
lines: `pid N`, then `exit CODE TIME` or `signal NUMBER TIME` when the command has ended; it closes
the socket when everything that the command started is gone. CORES is `0,1`, or empty for all.
"""

import contextlib
import ctypes
import os
import select
import signal
import sys
import time

LINUX = sys.platform.startswith("linux")
STOPPING = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
PASSED = (signal.SIGINT, *STOPPING, signal.SIGUSR1, signal.SIGUSR2)
# Processes left by the command may end by themselves (a resource tracker removes shared memory).
LEFTOVER_SECONDS = 0.3
_POLL_SECONDS = 0.02
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36


class ProcessGuard:
    """Runs a command, and supervises it until it and all its descendants are gone."""

    def __init__(self, channel: int, cores: str, command: list[str]) -> None:
        self._channel = channel
        os.set_inheritable(channel, False)
        self._libc = ctypes.CDLL(None, use_errno=True) if LINUX else None
        if self._libc:  # orphaned descendants become children of the guard, and can be found
            self._libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self._awake, wake = os.pipe()
        os.set_blocking(wake, False)
        signal.set_wakeup_fd(wake)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for number in PASSED:  # for the command only; ignored signals stay ignored
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, lambda *_: None)
        self._status: int | None = None
        self._passed = 0
        guard = os.getpid()  # with another parent, the child knows that this process has died
        self._pid = os.fork()
        if self._pid == 0:
            self._become(command, cores, guard)
        with contextlib.suppress(OSError):  # the command may have done it already, or be gone
            os.setpgid(self._pid, self._pid)
        quiet = os.open(os.devnull, os.O_RDWR)  # only the command holds the pipes' ends
        for stream in (0, 1, 2):
            os.dup2(quiet, stream)

    def run(self) -> None:
        """Return once no process is left."""
        self._say(f"pid {self._pid}")
        ended = self._watch()
        if ended:  # at once: the other processes' grace period starts here
            self._say_end()
        if not LINUX:
            self._kill_group()
        elif not (ended and self._nothing_left()):
            self._kill_all()
        if not ended:  # the launcher is gone, or asked to kill it
            while self._reap() is None:  # SIGKILL is sent, and takes a moment
                time.sleep(0.001)
            self._say_end()

    def _become(self, command: list[str], cores: str, guard: int) -> None:
        """Exec the command, in the new process."""
        try:
            os.setpgid(0, 0)
            for number in PASSED:
                if signal.getsignal(number) is not signal.SIG_IGN:
                    signal.signal(number, signal.SIG_DFL)
            # Python ignores these signals; a command expects their defaults.
            for number in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGCHLD):
                signal.signal(number, signal.SIG_DFL)
            if cores:
                os.sched_setaffinity(0, {int(core) for core in cores.split(",")})
            if self._libc:
                self._libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
                if os.getppid() != guard:
                    os._exit(1)
            os.execvp(command[0], command)
        except OSError as error:
            line = f"replicax: cannot run {command[0]}: {error.strerror}\n"
            os.write(2, line.encode(errors="surrogateescape"))
        finally:
            os._exit(127)

    def _watch(self) -> bool:
        """Return True when the command ends, False if it is to be killed or the launcher died."""
        while True:
            ready, _, _ = select.select([self._channel, self._awake], [], [])
            if self._channel in ready:
                wanted = self._received()
                if signal.SIGKILL in wanted:
                    return False
                for number in wanted:
                    self._pass_on(number)
            if self._awake in ready:
                os.read(self._awake, 4096)
                if self._reap() is not None:
                    return True

    def _received(self) -> bytes:
        """Return the signals to forward; SIGKILL if the launcher is gone."""
        try:
            return os.read(self._channel, 4096) or bytes([signal.SIGKILL])
        except OSError:
            return bytes([signal.SIGKILL])

    def _pass_on(self, number: int) -> None:
        """Forward SIGINT to the process group, like a terminal; others to the command only.

        Programs that run others (`uv run`, `timeout`) forward SIGTERM but not SIGINT: sent to the
        group, it would reach the training twice, and a second one often means to exit at once.
        """
        self._passed = number
        with contextlib.suppress(OSError):
            if number == signal.SIGINT:
                os.killpg(self._pid, number)
            else:
                os.kill(self._pid, number)

    def _nothing_left(self) -> bool:
        """Return whether all remaining descendants of an ended command exit by themselves.

        A shell killed by a signal does not pass it to its program: that program gets the signal
        too, and the launcher's grace period.
        """
        living = _descendants()
        if self._passed and self._passed != signal.SIGINT:
            _signal_each(living, self._passed)
        deadline = time.monotonic() + LEFTOVER_SECONDS
        while living and (self._passed or time.monotonic() < deadline):
            if select.select([self._channel], [], [], _POLL_SECONDS)[0]:
                wanted = self._received()
                if signal.SIGKILL in wanted:
                    return False
                for self._passed in wanted:
                    _signal_each(living, self._passed)
            self._reap()
            living = _descendants()
        return not living

    def _kill_all(self) -> None:
        """Kill all descendants of the guard, including those in other process groups."""
        self._kill_group()
        while living := _descendants():  # again: what is killed may have just forked
            _signal_each(living, signal.SIGKILL)
            time.sleep(0.001)
            self._reap()

    def _kill_group(self) -> None:
        with contextlib.suppress(OSError):
            os.killpg(self._pid, signal.SIGKILL)

    def _reap(self) -> int | None:
        """Reap ended children; return the command's exit code if known, negative for a signal."""
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if ended[0] == self._pid:
                    self._status = os.waitstatus_to_exitcode(ended[1])
        return self._status

    def _say_end(self) -> None:
        status = self._status or 0
        how = f"signal {-status}" if status < 0 else f"exit {status}"
        self._say(f"{how} {time.time():.6f}")

    def _say(self, line: str) -> None:
        with contextlib.suppress(OSError):  # the launcher is gone
            os.write(self._channel, f"{line}\n".encode())


def _signal_each(processes: list[int], number: int) -> None:
    for process in processes:
        with contextlib.suppress(OSError):
            os.kill(process, number)


def _descendants() -> list[int]:
    children: dict[int, list[int]] = {}
    for name in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
            # The name in parentheses may contain anything, including parentheses.
            state, parent = file.read().rpartition(b")")[2].split()[:2]
            if state not in (b"Z", b"X"):
                children.setdefault(int(parent), []).append(int(name))
    descendants: list[int] = []
    below = [os.getpid()]
    while below:
        nearest = children.get(below.pop(), [])
        descendants += nearest
        below += nearest
    return descendants


if __name__ == "__main__":
    ProcessGuard(int(sys.argv[1]), sys.argv[2], sys.argv[3:]).run()
