"""One attempt to run a job: start all processes and supervise them until the last is gone."""

import dataclasses
import signal
import time
from collections.abc import Callable, Sequence

from replicax.cluster.differences import processes_text
from replicax.cluster.watchdog import SAVED
from replicax.errors import ClusterError
from replicax.launch.cause import Ended, Failure, first_failure, posix_signal_name
from replicax.launch.echo import Echo
from replicax.launch.event_loop import POLL_SECONDS, EventLoop
from replicax.launch.process import Process, ProcessStart, RunningProcess

# After the first failure: the others first get time to print why they end, then SIGTERM, then
# SIGKILL. All are gone within 2 seconds.
TERM_SECONDS = 1.0
KILL_SECONDS = 1.4
DRAIN_SECONDS = 0.5
STOPPED_EARLY = "stopped early with everything saved"


@dataclasses.dataclass(frozen=True)
class Conclusion:
    """Conclusion on an attempt."""

    exit_code: int
    """0 if all processes are done; 75 if they stopped early with everything saved; else the exit
    code of the first failure, 128 plus the number for a signal."""
    failure: Failure | None = None
    """The first failure, if one is to blame."""
    message: str | None = None
    """One line about the end, if it was not a normal one."""


class Attempt:
    """Starts the processes of a job, which end together, and supervises them in `loop`.

    `begin` starts one of them, on this host unless it is another class than `Process`.
    """

    def __init__(
        self,
        starts: Sequence[ProcessStart],
        loop: EventLoop,
        begin: Callable[[ProcessStart, Echo], RunningProcess] = Process,
    ) -> None:
        self._starts, self._loop, self._begin = starts, loop, begin
        self._processes: list[RunningProcess] = []

    def run(self) -> list[Ended]:
        """Return how each process ended, once all are gone.

        Raises:
            ClusterError: the system cannot start that many processes.
        """
        try:
            self.start()
            while not self.over:
                self._loop.turn()
        finally:  # even after an error, nothing is left running
            self.close()
        return self.ended()

    def start(self) -> None:
        """Start all processes; after an error, close it.

        Raises:
            ClusterError: the system cannot start that many processes.
        """
        for start in self._starts:
            try:
                process = self._begin(start, self._loop.echo)
            except OSError as error:
                raise ClusterError(
                    f"process {start.number} of {len(self._starts)} cannot be started: "
                    f"{error.strerror}; start fewer, or raise the limit (ulimit -n, ulimit -u)"
                ) from error
            self._processes.append(process)
            self._loop.listening[process] = self._listen
            self._loop.reading |= process.streams

    @property
    def over(self) -> bool:
        """Whether all processes are gone and their outputs are read."""
        return not (self._left or self._streams)

    def close(self) -> None:
        """Kill all that is left, and close all descriptors."""
        for process in self._processes:
            self._loop.listening.pop(process, None)
            for stream in process.streams:
                self._loop.reading.pop(stream, None)
            process.stop(signal.SIGKILL)
            process.close()
        for action in (self._end_alone, self._end_left, self._kill_left, self._stop_reading):
            self._loop.due.pop(action, None)

    def ended(self) -> list[Ended]:
        """Return how each process ended, once it is over."""
        return [process.ended() for process in self._processes]

    def end_with_grace(self) -> list[int]:
        """Terminate the processes that are left, with time to exit; return their numbers."""
        numbers = [each.start.number for each in self._processes if each.status is None]
        if not numbers or self._ending:
            return []
        self._loop.due[self._kill_left] = time.monotonic() + self._loop.grace_seconds
        self._end_left()
        return numbers

    @property
    def _left(self) -> list[RunningProcess]:
        return [each for each in self._processes if each in self._loop.listening]

    @property
    def _streams(self) -> list[int]:
        of_all = [stream for each in self._processes for stream in each.streams]
        return [stream for stream in of_all if stream in self._loop.reading]

    @property
    def _ending(self) -> bool:
        """Whether the time at which the rest is killed is set."""
        return bool({self._kill_left, self._loop.kill_all} & self._loop.due.keys())

    def _listen(self, process: RunningProcess) -> None:
        loop, known, now = self._loop, process.status is not None, time.monotonic()
        # Its status comes before the last message: the guard still ends what the command left.
        if not process.listen():
            del loop.listening[process]
            if not self._left:  # an escaped process may hold the streams open forever
                loop.due[self._stop_reading] = now + DRAIN_SECONDS
        if known or process.status is None or process.forced:
            return
        if process.status == SAVED:  # the others should follow
            loop.due.setdefault(self._end_alone, now + loop.grace_seconds)
        elif process.status != 0:
            # SIGUSR1, say, ends a program that does not handle it: then it was meant to end all.
            if -process.status in loop.passed and loop.stopped_by is None:
                loop.stopped_by = -process.status
            if not self._ending:
                loop.due[self._end_left] = now + TERM_SECONDS
                loop.due[self._kill_left] = now + KILL_SECONDS

    def _end_alone(self) -> None:
        """Terminate the processes that did not stop early with the others, and name them."""
        if late := self.end_with_grace():
            self._loop.echo.say(
                f"replicax: the others stopped early; SIGTERM to {processes_text(late)}, which "
                f"{'has' if len(late) == 1 else 'have'} {self._loop.grace_seconds:g} s to exit",
                error=True,
            )

    def _end_left(self) -> None:
        for process in self._left:
            process.stop(signal.SIGTERM)

    def _kill_left(self) -> None:
        for process in self._left:
            process.stop(signal.SIGKILL)

    def _stop_reading(self) -> None:
        if self._loop.echo.full:  # not all of the output has been read
            self._loop.due[self._stop_reading] = time.monotonic() + POLL_SECONDS
            return
        for stream in self._streams:
            self._loop.reading.pop(stream).end()


def judge(loop: EventLoop, ended: Sequence[Ended]) -> Conclusion:
    """Return the conclusion on an attempt, given how its processes ended."""
    if all(each.status == 0 for each in ended):
        return Conclusion(0)
    if _stopped_early(loop, ended):
        return Conclusion(SAVED, message=f"{STOPPED_EARLY}; start it again to resume")
    failure = first_failure(ended)
    stopped_by = loop.stopped_by
    if stopped_by is None:
        return Conclusion(failure.exit_code, failure, str(failure)) if failure else Conclusion(1)
    why = stop_text(stopped_by)
    if failure is None or loop.natural(ended[failure.process]):
        return Conclusion(128 + stopped_by, message=why)
    message = f"{why}; process {failure.process}: {failure.cause}{failure.see}"
    return Conclusion(failure.exit_code, failure, message)


def stop_text(stopped_by: int) -> str:
    """Return how a message says that this signal ended the job."""
    if stopped_by == signal.SIGPIPE:
        return "stopped: its output was closed by the reader"
    return f"stopped by {posix_signal_name(stopped_by)}"


def _stopped_early(loop: EventLoop, ended: Sequence[Ended]) -> bool:
    """Return whether some processes stopped early with all saved, and none failed by itself."""
    saved = {number for number, each in enumerate(ended) if each.status == SAVED}

    def in_order(each: Ended) -> bool:
        if each.well:
            return True
        if each.report:  # it stopped because those that had saved were gone
            return bool(each.report.blames) and saved.issuperset(each.report.blames)
        if loop.stopped_by is None:  # it continued without the others
            return each.forced
        return loop.natural(each) and not each.forced  # too early to handle the signal

    return bool(saved) and all(map(in_order, ended))
