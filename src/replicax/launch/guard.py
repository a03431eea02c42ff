"""A guard beside each process: whatever becomes of the launcher, nothing is left running.

A program of its own, run by path with `python -I -S` so that it starts in milliseconds:

    guard.py SOCKET CORES COMMAND ...

SOCKET is a descriptor whose other end only the launcher has. Bytes that come are signals to pass
on; its end is the launcher's, and then everything below the guard is killed. The guard answers in
lines: `pid N`, then `exit CODE TIME` or `signal NUMBER TIME` when the command has ended; it closes
the socket when all that the command started is gone. CORES is `0,1`, or empty for all.
"""

import contextlib
import ctypes
import os
import select
import signal
import sys
import time
from collections.abc import Mapping

LINUX = sys.platform.startswith("linux")
PASSED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
# What the command left running may end by itself (a resource tracker removes shared memory).
LEFTOVER_SECONDS = 0.3
POLL_SECONDS = 0.02
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36


def main(arguments: list[str]) -> None:
    """Run the command and watch over it until it and all that it started are gone."""
    channel = int(arguments[0])
    os.set_inheritable(channel, False)
    libc = ctypes.CDLL(None, use_errno=True) if LINUX else None
    if libc is not None:  # what loses its parent becomes the guard's own, and can be found
        libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    before = {number: signal.signal(number, signal.SIG_IGN) for number in PASSED}
    awake, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    guard = os.getpid()
    command = os.fork()
    if command == 0:
        _become(arguments[2:], arguments[1], before, guard, libc)
    with contextlib.suppress(OSError):  # the command may have done it already, or be gone
        os.setpgid(command, command)
    quiet = os.open(os.devnull, os.O_RDWR)  # the pipes' ends are the command's alone
    for stream in (0, 1, 2):
        os.dup2(quiet, stream)
    _say(channel, f"pid {command}")
    status, passed = _watch(channel, awake, command)
    if status is not None:  # at once: the others' time to end runs from here
        _say_end(channel, status)
    if not LINUX:
        _kill_group(command)
    elif status is None or not _ended(command, channel, passed):
        _kill_all(command)
    if status is None:  # the launcher is gone, or wants it gone
        _say_end(channel, _reaped(command))


def _become(
    command: list[str],
    cores: str,
    handlers: Mapping[signal.Signals, object],
    guard: int,
    libc: ctypes.CDLL | None,
) -> None:
    """In the new process: turn into the command."""
    try:
        os.setpgid(0, 0)
        for number, handler in handlers.items():
            ignored = handler is signal.SIG_IGN
            signal.signal(number, signal.SIG_IGN if ignored else signal.SIG_DFL)
        # Python ignores these from its start on; a command expects them as they are by default.
        for number in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        if cores:
            os.sched_setaffinity(0, {int(core) for core in cores.split(",")})
        if libc is not None:
            libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            if os.getppid() != guard:
                os._exit(1)
        os.execvp(command[0], command)
    except OSError as error:
        line = f"replicax: cannot run {command[0]}: {error.strerror}\n"
        os.write(2, line.encode(errors="surrogateescape"))
    finally:
        os._exit(127)


def _watch(channel: int, awake: int, command: int) -> tuple[int | None, int]:
    """The command's exit code, negative for a signal, and the last signal that was passed on.

    The exit code is None where the launcher is gone or wants the command gone.
    """
    passed = 0
    while True:
        ready, _, _ = select.select([channel, awake], [], [])
        if channel in ready:
            wanted = _received(channel)
            if not wanted or signal.SIGKILL in wanted:
                return None, passed
            for number in wanted:
                passed = number
                _pass_on(command, number)
        if awake in ready:
            os.read(awake, 4096)
            if (status := _reap(command)) is not None:
                return status, passed


def _received(channel: int) -> bytes:
    try:
        return os.read(channel, 4096)
    except OSError:
        return b""


def _pass_on(command: int, number: int) -> None:
    """A Ctrl-C is for all of them, as at a terminal; what `kill` sends is for the command alone.

    Programs that run others (`uv run`, `timeout`) hand on the second and not the first: sent to
    all, it would reach a training twice, and twice often means at once.
    """
    with contextlib.suppress(OSError):
        if number == signal.SIGINT:
            os.killpg(command, number)
        else:
            os.kill(command, number)


def _ended(command: int, channel: int, passed: int) -> bool:
    """Whether all that an ended command left behind ends by itself.

    A shell dies of a signal and leaves its program unaware: that program gets the signal too, and
    the time that the launcher gives it.
    """
    left = _descendants()
    if passed and passed != signal.SIGINT:
        _signal_each(left, passed)
    deadline = time.monotonic() + LEFTOVER_SECONDS
    while left and (passed or time.monotonic() < deadline):
        if select.select([channel], [], [], POLL_SECONDS)[0]:
            wanted = _received(channel)
            if not wanted or signal.SIGKILL in wanted:
                return False
            for passed in wanted:
                _signal_each(left, passed)
        _reap(command)
        left = _descendants()
    return not left


def _kill_all(command: int) -> None:
    """Kill all that descends from the guard, those in groups of their own included."""
    _kill_group(command)
    while left := _descendants():
        _signal_each(left, signal.SIGKILL)
        time.sleep(0.001)
        _reap(command)


def _signal_each(processes: list[int], number: int) -> None:
    for process in processes:
        with contextlib.suppress(OSError):
            os.kill(process, number)


def _kill_group(command: int) -> None:
    with contextlib.suppress(OSError):
        os.killpg(command, signal.SIGKILL)


_statuses: dict[int, int] = {}


def _reap(command: int) -> int | None:
    """Collect what has ended; the command's exit code once it has."""
    with contextlib.suppress(ChildProcessError):
        while True:
            process, status = os.waitpid(-1, os.WNOHANG)
            if process == 0:
                break
            if process == command:
                _statuses[process] = os.waitstatus_to_exitcode(status)
    return _statuses.get(command)


def _reaped(command: int) -> int:
    while (status := _reap(command)) is None:
        time.sleep(0.001)
    return status


def _descendants() -> list[int]:
    """All living processes below the guard."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdecimal():
            with contextlib.suppress(OSError):
                with open(f"/proc/{name}/stat", "rb") as file:
                    # The name in brackets may hold anything, brackets too.
                    state, parent = file.read().rpartition(b")")[2].split()[:2]
                if state not in (b"Z", b"X"):
                    children.setdefault(int(parent), []).append(int(name))
    found: list[int] = []
    below = [os.getpid()]
    while below:
        nearest = children.get(below.pop(), [])
        found += nearest
        below += nearest
    return found


def _say_end(channel: int, status: int) -> None:
    told = f"signal {-status}" if status < 0 else f"exit {status}"
    _say(channel, f"{told} {time.time():.6f}")


def _say(channel: int, line: str) -> None:
    with contextlib.suppress(OSError):  # the launcher is gone
        os.write(channel, f"{line}\n".encode())


if __name__ == "__main__":
    main(sys.argv[1:])
