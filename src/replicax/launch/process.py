"""One process of a job on this host: its cores, its port, and its guard."""

import contextlib
import dataclasses
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from replicax.cluster import variables
from replicax.errors import ConfigError
from replicax.launch.cause import Ended, read_report
from replicax.launch.echo import Echo, Log, Output
from replicax.launch.job_spec import JobSpec
from replicax.net.secret import SECRET, SECRET_FILE

GUARD = Path(__file__).with_name("guard.py")
TOPOLOGY = Path("/sys/devices/system/cpu")
EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")
LOWEST_PORT, PORT_TRIES = 20000, 50


@dataclasses.dataclass(frozen=True)
class ProcessStart:
    """The settings of one process of a job."""

    job: JobSpec
    number: int
    coordinator: str
    """Address of process 0."""
    job_id: str
    secret: str = dataclasses.field(repr=False)
    env: Mapping[str, str] = dataclasses.field(repr=False)
    """The environment of the job."""
    log: Path
    """File for both of its streams."""
    report: Path
    """File for its failure report."""
    cores: Sequence[int] = ()
    """Cores that it may use; empty means all."""
    row: int | None = None
    """Its index in the launcher's output, if that is not its number."""

    @property
    def own_env(self) -> dict[str, str]:
        """The environment of the process, including its place in the job."""
        devices = self.job.devices_per_process
        # Only one of the two variables of a secret may be set.
        kept = {name: value for name, value in self.env.items() if name != SECRET_FILE}
        return {
            **kept,
            **({} if devices is None else {"JAX_NUM_CPU_DEVICES": str(devices)}),
            variables.PROCESS_ID: str(self.number),
            variables.PROCESSES: str(self.job.processes),
            variables.COORDINATOR: self.coordinator,
            variables.JOB_ID: self.job_id,
            SECRET: self.secret,
            variables.FAILURE_FILE: str(self.report),
            "PYTHONUNBUFFERED": "1",
        }


class RunningProcess(Protocol):
    """A process as an `Attempt` sees it: of this host, or of another one."""

    start: ProcessStart
    status: int | None
    """Its exit code once it has ended, negative for a signal."""
    forced: bool
    """Whether the launcher told it to end before it did."""
    streams: dict[int, Output]
    """Its outputs, by descriptor."""
    channel: int
    """The descriptor that is readable when there is something to `listen` to."""

    def listen(self) -> bool:
        """Learn what has happened; return False after the last time."""

    def send(self, number: int) -> None:
        """Forward a signal."""

    def stop(self, number: int) -> None:
        """Stop it with a signal, SIGTERM or SIGKILL."""
        self.forced |= self.status is None
        self.send(number)

    def close(self) -> None:
        """Close all descriptors."""

    def ended(self) -> Ended:
        """Return how the process ended."""


class Process(RunningProcess):
    """A command that runs under a guard; see `guard.py`."""

    def __init__(self, start: ProcessStart, echo: Echo) -> None:
        self.start = start
        self.status: int | None = None
        self.forced = False
        self._ended_at = 0.0
        self._pid: int | None = None
        self._partial = b""
        self._log = Log(start.log, echo)
        with contextlib.ExitStack() as opened:  # closed here if the system starts no process
            opened.callback(self._log.close)
            self._channel, theirs = map(opened.enter_context, socket.socketpair())
            with theirs:
                arguments = [str(theirs.fileno()), ",".join(map(str, start.cores))]
                self._guard = subprocess.Popen(
                    [sys.executable, "-I", "-S", str(GUARD), *arguments, *start.job.command],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    bufsize=0,
                    env=start.own_env,
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,  # a terminal's Ctrl-C comes only through the launcher
                )
            opened.pop_all()
        assert self._guard.stdout
        assert self._guard.stderr
        row = start.number if start.row is None else start.row
        self._errors = Output(row, echo, self._log, error=True)
        self.streams = {
            self._guard.stdout.fileno(): Output(row, echo, self._log, error=False),
            self._guard.stderr.fileno(): self._errors,
        }
        self.channel = self._channel.fileno()

    def listen(self) -> bool:
        """Read messages from the guard; return False after the last one."""
        try:
            received = self._channel.recv(4096)
        except OSError:
            received = b""
        *lines, self._partial = (self._partial + received).split(b"\n")
        for line in lines:
            kind, number, *at = line.decode().split()
            if kind == "pid":
                self._pid = int(number)
            else:
                self.status = int(number) if kind == "exit" else -int(number)
                self._ended_at = float(at[0])
        if received:
            return True
        if self.status is None:  # the guard was killed, and so the command; kill its group too
            if self._pid is not None:
                with contextlib.suppress(OSError):
                    os.killpg(self._pid, signal.SIGKILL)
            self.status, self._ended_at = -signal.SIGKILL, time.time()
        self._guard.wait()  # it has closed its end, or is dead: this reaps it
        return False

    def send(self, number: int) -> None:
        """Forward a signal."""
        with contextlib.suppress(OSError):
            self._channel.send(bytes([number]))

    def close(self) -> None:
        """Close all descriptors; the guard, if still running, kills all remaining processes."""
        self._channel.close()
        self._guard.wait()
        for stream in (self._guard.stdout, self._guard.stderr, self._log):
            if stream:
                stream.close()

    def ended(self) -> Ended:
        """Return how the process ended."""
        assert self.status is not None
        return Ended(
            status=self.status,
            time=self._ended_at,
            forced=self.forced,
            report=read_report(self.start.report),
            errors=tuple(self._errors.tail),
            log=self.start.log,
        )


def core_blocks(processes: int) -> list[tuple[int, ...]]:
    """Divide the cores evenly among processes, keeping hardware threads of a core together."""
    if not hasattr(os, "sched_getaffinity"):
        raise ConfigError("--pin on a system without CPU affinity: leave it out")
    cores = sorted(os.sched_getaffinity(0), key=lambda core: (_physical(core), core))
    if processes > len(cores):
        raise ConfigError(
            f"--pin with --processes {processes} on {len(cores)} cores; each process needs a core: "
            f"use at most {len(cores)} processes, or leave --pin out"
        )
    size = len(cores) // processes
    return [tuple(cores[first : first + size]) for first in range(0, size * processes, size)]


def _physical(core: int) -> int:
    """Return the first hardware thread of the physical core of `core`."""
    path = TOPOLOGY / f"cpu{core}" / "topology" / "thread_siblings_list"
    try:
        return int(path.read_text(encoding="ascii").replace("-", ",").split(",")[0])
    except (OSError, ValueError):
        return core


def free_port() -> int:
    """Return a free port.

    It is below the range of ephemeral ports, if that is known: an outgoing connection could
    otherwise take the port before process 0 listens on it, or even connect to itself.
    """
    with socket.socket() as listener:
        for _ in range(PORT_TRIES):
            with contextlib.suppress(OSError, ValueError):
                start = int(EPHEMERAL.read_text(encoding="ascii").split()[0])
                listener.bind(("127.0.0.1", random.randrange(LOWEST_PORT, start)))
                break
        else:
            listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port
