"""One start of all processes of a job, until the last of them is gone."""

import dataclasses
import os
import selectors
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from replicax.cluster import variables
from replicax.cluster.differences import processes_text
from replicax.cluster.verdict import SAVED
from replicax.errors import ClusterError
from replicax.launch.cause import Ended, read_report, signal_name
from replicax.launch.job import Job
from replicax.launch.output import Echo, Log, Output
from replicax.launch.process import Process
from replicax.launch.signals import Signals

# After the first failure: by then the others have said why they end, and then they are made to.
# All are gone within 2 seconds.
TERM_SECONDS = 1.0
KILL_SECONDS = 1.4
DRAIN_SECONDS = 0.5
POLL_SECONDS = 0.05
READ_BYTES = 1 << 16


@dataclasses.dataclass(frozen=True)
class Files:
    """Where a process writes.

    Args:
        log: both of its streams.
        failure: its report, where it fails.
    """

    log: Path
    failure: Path


class Attempt:
    """Starts all processes and watches over them.

    Args:
        job: what is started.
        env: the environment of each process.
        cores: those of each process; none means all.
        files: of each process.
        echo: where their output is shown.
        signals: those that this launcher gets.
        grace_seconds: that the processes have after a SIGINT or SIGTERM.
    """

    def __init__(
        self,
        job: Job,
        env: Sequence[Mapping[str, str]],
        cores: Sequence[Sequence[int]],
        files: Sequence[Files],
        echo: Echo,
        signals: Signals,
        grace_seconds: float,
    ) -> None:
        self.stopped_by: int | None = None
        self._job, self._env, self._cores, self._files = job, env, cores, files
        self._echo, self._signals, self._grace = echo, signals, grace_seconds
        self._passed: set[int] = set()
        self._term_at: float | None = None
        self._kill_at: float | None = None
        self._drained_at: float | None = None
        self._alone_at: float | None = None
        self._processes: list[Process] = []
        self._outputs: list[tuple[Output, Output]] = []
        self._logs: list[Log] = []
        self._listening: set[int] = set()
        self._reading: dict[int, Output] = {}
        self._paused = False
        self._selector = selectors.DefaultSelector()

    def run(self) -> list[Ended]:
        """Return once all are gone; how each ended.

        Raises:
            ClusterError: the system does not let so many processes start.
        """
        self._selector.register(self._signals.descriptor, selectors.EVENT_READ, None)
        try:
            for number in range(self._job.processes):
                self._start(number)
            while self._listening or self._reading:
                self._turn()
        finally:  # after an error too, nothing is left running
            for process in self._processes:
                process.stop(signal.SIGKILL)
                process.close()
            for log in self._logs:
                log.close()
            self._selector.close()
        return [self._ended(number) for number in range(self._job.processes)]

    @property
    def told(self) -> bool:
        """Whether this launcher was told to end, or to tell the processes something."""
        return self.stopped_by is not None or bool(self._passed)

    def natural(self, ended: Ended) -> bool:
        """Whether a process ended as it was told to: by a signal passed on, or by force."""
        end = ended.end
        told = {-number for number in self._passed} | {128 + number for number in self._passed}
        return end.well or end.forced or end.status in told

    def _start(self, number: int) -> None:
        files = self._files[number]
        try:
            log = Log(files.log, lambda line: self._echo.say(f"replicax: {line}", error=True))
            self._logs.append(log)
            process = Process(number, self._job.command, self._env[number], self._cores[number])
        except OSError as error:
            raise ClusterError(
                f"process {number} of {self._job.processes} cannot be started: {error.strerror}; "
                "start fewer, or raise the limit (ulimit -n, ulimit -u)"
            ) from error
        self._processes.append(process)
        self._listening.add(number)
        self._selector.register(process.channel, selectors.EVENT_READ, process)
        pair = []
        for stream, is_error in ((process.stdout, False), (process.stderr, True)):
            output = Output(number, self._echo, log, error=is_error)
            self._reading[stream] = output
            self._selector.register(stream, selectors.EVENT_READ, output)
            pair.append(output)
        self._outputs.append((pair[0], pair[1]))

    def _turn(self) -> None:
        """Wait for something to happen, and deal with it."""
        self._pause_if_full()
        for key, _ in self._selector.select(self._wait_seconds()):
            what: Any = key.data
            if isinstance(what, Output):
                self._read(key.fd, what)
            elif isinstance(what, Process):
                self._listen(what)
        for number in self._signals.take():
            self._pass_on(number)
        if self._echo.closed and self.stopped_by is None:
            self._stop(signal.SIGPIPE, signal.SIGTERM)
        self._force()

    def _read(self, stream: int, output: Output) -> None:
        data = os.read(stream, READ_BYTES)
        if data:
            output.feed(data)
        else:
            self._end_reading(stream)

    def _end_reading(self, stream: int) -> None:
        self._reading.pop(stream).end()
        if not self._paused:
            self._selector.unregister(stream)

    def _listen(self, process: Process) -> None:
        known = process.end is not None
        if not process.listen():
            self._selector.unregister(process.channel)
            self._listening.discard(process.number)
            if not self._listening:  # what escaped its guard may hold the streams open for good
                self._drained_at = time.monotonic() + DRAIN_SECONDS
        end = process.end
        if known or end is None or end.forced:
            return
        if end.well:
            if end.status == SAVED and self._alone_at is None:  # the others end with it
                self._alone_at = time.monotonic() + self._grace
            return
        if -end.status in self._passed and self.stopped_by is None:
            self.stopped_by = -end.status
        if self._term_at is None and self._kill_at is None:
            now = time.monotonic()
            self._term_at, self._kill_at = now + TERM_SECONDS, now + KILL_SECONDS

    def _pass_on(self, number: int) -> None:
        if number == signal.SIGINT and self.stopped_by in (signal.SIGINT, signal.SIGTERM):
            self._kill_at = time.monotonic()
            self._echo.hurry()
        elif number in (signal.SIGINT, signal.SIGTERM):
            self._stop(number, number)
        else:
            self._send(number)

    def _stop(self, why: int, number: int) -> None:
        first = self.stopped_by is None
        self.stopped_by = self.stopped_by or why
        self._send(number)
        if self._kill_at is None:
            self._kill_at = time.monotonic() + self._grace
        if first and why != signal.SIGPIPE:
            self._echo.say(
                f"replicax: {signal_name(why)} passed on; all have {self._grace:g} s to end, "
                "Ctrl-C ends them now",
                error=True,
            )

    def _send(self, number: int) -> None:
        self._passed.add(number)
        for process in self._processes:
            process.send(number)

    def _force(self) -> None:
        """End what is left, once its time is over."""
        now = time.monotonic()
        if self._term_at is not None and now >= self._term_at:
            self._term_at = float("inf")
            self._stop_left(signal.SIGTERM)
        if self._alone_at is not None and now >= self._alone_at:
            self._alone_at = float("inf")
            self._end_alone(now)
        if self._kill_at is not None and now >= self._kill_at:
            self._term_at = self._kill_at = float("inf")
            self._stop_left(signal.SIGKILL)
        if self._drained_at is not None and now >= self._drained_at and not self._echo.full:
            for stream in list(self._reading):
                self._end_reading(stream)

    def _end_alone(self, now: float) -> None:
        """Those who have saved were told to; who did not come along is told, too."""
        left = [process.number for process in self._processes if process.end is None]
        if left and self._kill_at is None:
            self._kill_at = now + self._grace
            self._stop_left(signal.SIGTERM)
            self._echo.say(
                f"replicax: the others stopped early; SIGTERM to {processes_text(left)}, which "
                f"{'has' if len(left) == 1 else 'have'} {self._grace:g} s to end",
                error=True,
            )

    def _stop_left(self, number: int) -> None:
        for process in self._processes:
            if process.number in self._listening:
                process.stop(number)

    def _wait_seconds(self) -> float | None:
        times = [
            at
            for at in (self._term_at, self._kill_at, self._drained_at, self._alone_at)
            if at is not None and at != float("inf")
        ]
        # Output that nobody reads may hold up the end.
        at_least = POLL_SECONDS if self._echo.full else 0.0
        return max(min(times) - time.monotonic(), at_least) if times else None

    def _pause_if_full(self) -> None:
        """Read no more while what was read waits to be shown: the processes wait in turn."""
        if self._echo.full == self._paused:
            return
        self._paused = not self._paused
        for stream, output in self._reading.items():
            if self._paused:
                self._selector.unregister(stream)
            else:
                self._selector.register(stream, selectors.EVENT_READ, output)

    def _ended(self, number: int) -> Ended:
        end = self._processes[number].end
        assert end is not None
        files = self._files[number]
        return Ended(
            end=end,
            report=read_report(files.failure, number),
            errors=tuple(self._outputs[number][1].tail),
            log=files.log,
        )


def environments(
    job: Job, base: Mapping[str, str], port: int, job_id: str, files: Sequence[Files]
) -> list[dict[str, str]]:
    """The environment of each process."""
    common = {
        **base,
        variables.PROCESSES: str(job.processes),
        variables.COORDINATOR: f"127.0.0.1:{port}",
        variables.JOB_ID: job_id,
        "PYTHONUNBUFFERED": "1",
    }
    if job.devices_per_process is not None:
        common["JAX_NUM_CPU_DEVICES"] = str(job.devices_per_process)
    return [
        {
            **common,
            variables.PROCESS_ID: str(number),
            variables.FAILURE_FILE: str(each.failure.absolute()),
        }
        for number, each in enumerate(files)
    ]
