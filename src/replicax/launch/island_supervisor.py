"""Islands of one launcher: each is started again by itself, and the others never stop."""

import dataclasses
import time
from collections.abc import Callable, Sequence

from replicax.cluster.watchdog import SAVED
from replicax.errors import ClusterError
from replicax.islands.island_variables import ISLAND, ISLANDS
from replicax.launch.attempt import STOPPED_EARLY, Attempt, Conclusion, judge, stop_text
from replicax.launch.cause import USAGE
from replicax.launch.context import LaunchContext
from replicax.launch.event_loop import EventLoop
from replicax.launch.process import free_port
from replicax.text.wording import counted

RESTARTS_IN_A_ROW = 20
"""Restarts of an island that keeps dying early, by default: 80 seconds of waiting."""
EARLY_SECONDS = 60.0
FIRST_WAIT_SECONDS, LONGEST_WAIT_SECONDS = 0.2, 5.0


def run_islands(context: LaunchContext, loop: EventLoop) -> tuple[Conclusion, int]:
    """Run the islands of a job; return the conclusion, and the most starts of an island."""
    job, ports = context.job, set[int]()
    while len(ports) < (job.islands or 0):
        ports.add(free_port())
    addresses = ",".join(f"127.0.0.1:{port}" for port in ports)

    def of(number: int) -> Island:
        place = {ISLAND: str(number), ISLANDS: addresses}
        own = dataclasses.replace(context, env={**context.env, **place})
        names = [f"island-{number}{part}" for part in _parts(job.processes)]
        first_row = number * job.processes
        return Island(number, lambda at: Attempt(own.starts(names, at, first_row), loop), loop)

    islands = [of(number) for number in range(len(ports))]
    conclusion = IslandSupervisor(islands, job.restarts, loop).run()
    return conclusion, max(island.attempts for island in islands)


def island_labels(islands: int, processes: int) -> list[str]:
    """Return the names of all processes in the output: `island 1`, or `island 1.0` of several."""
    width = len(str(islands - 1))
    parts = _parts(processes)
    return [f"island {number:{width}}{part}" for number in range(islands) for part in parts]


def _parts(processes: int) -> list[str]:
    """Return what follows an island's number in the names of its processes."""
    return [f".{process}" for process in range(processes)] if processes > 1 else [""]


class Island:
    """One island: the attempt that runs, if any, and how often it was started.

    `prepare` returns its next attempt, given the number, from 1.
    """

    def __init__(self, number: int, prepare: Callable[[int], Attempt], loop: EventLoop) -> None:
        self.number, self._prepare, self._loop = number, prepare, loop
        self.attempt: Attempt | None = None
        self.attempts = 0
        self.early = 0
        """Ends soon after a start, in a row."""
        self.starts_at: float | None = None
        """When it is started again, on the clock of `time.monotonic`."""
        self._began = 0.0

    def start(self) -> None:
        """Start its processes.

        Raises:
            ClusterError: the system cannot start that many; nothing of it runs then.
        """
        self.attempts, self.starts_at = self.attempts + 1, None
        self._began = time.monotonic()
        self.attempt = self._prepare(self.attempts)
        try:
            self.attempt.start()
        except ClusterError:
            self.close()
            raise

    def close(self) -> None:
        """Kill what is left of its attempt, and forget it."""
        if self.attempt is not None:
            self.attempt.close()
            self.attempt = None

    def judge(self) -> Conclusion:
        """Return the conclusion on its attempt, which is over, and forget it."""
        attempt = self.attempt
        assert attempt is not None
        self.close()
        return judge(self._loop, attempt.ended())

    def lived(self) -> float:
        """Return the seconds since its start; an early end is counted, and a later one resets."""
        seconds = time.monotonic() - self._began
        self.early = self.early + 1 if seconds < EARLY_SECONDS else 0
        return seconds

    @property
    def wait_seconds(self) -> float:
        """Time until its next start."""
        doubled = FIRST_WAIT_SECONDS * 2.0 ** min(max(self.early - 1, 0), 10)
        return min(doubled, LONGEST_WAIT_SECONDS)


class IslandSupervisor:
    """Runs islands until all are done, stopped or given up.

    An island that ends with anything but 0 is started again, unless it ends with 2, or more than
    `restarts` times in a row soon after its start. Once one is done, or a signal was forwarded,
    none is started again.
    """

    def __init__(self, islands: Sequence[Island], restarts: int, loop: EventLoop) -> None:
        self._islands, self._restarts, self._loop = islands, restarts, loop
        self._done = self._saved = False
        self._failed: list[Conclusion] = []
        """Conclusions on islands that are given up, or failed when stopped, in order of time."""

    def run(self) -> Conclusion:
        """Return what came of all islands, once nothing runs.

        Raises:
            ClusterError: the system cannot start that many processes.
        """
        try:
            for island in self._islands:
                island.start()
            while self._go_on():
                self._loop.turn()
                for island in self._islands:
                    if island.attempt is not None and island.attempt.over:
                        self._take(island, island.judge())
        finally:  # even after an error, nothing is left running
            for island in self._islands:
                island.close()
        if self._failed:
            return self._failed[0]
        if self._done:
            return Conclusion(0)
        if self._saved:
            return Conclusion(SAVED, message=f"{STOPPED_EARLY}; start it again to resume")
        assert self._loop.stopped_by is not None
        return Conclusion(128 + self._loop.stopped_by, message=stop_text(self._loop.stopped_by))

    @property
    def _ending(self) -> bool:
        return self._done or self._loop.stopped_by is not None

    def _go_on(self) -> bool:
        """Return whether an island runs or will be started again."""
        if self._ending:
            for island in self._islands:
                island.starts_at = None
        return any(each.attempt is not None or each.starts_at is not None for each in self._islands)

    def _take(self, island: Island, conclusion: Conclusion) -> None:
        """Decide what follows from the end of an island."""
        name, seconds = f"island {island.number}", island.lived()
        now = time.monotonic()
        if conclusion.exit_code == 0:
            self._done = True
            self._loop.due.setdefault(self._stop_rest, now + self._loop.grace_seconds)
            return
        how = STOPPED_EARLY if conclusion.exit_code == SAVED else f"died ({_cause(conclusion)})"
        how = f"{name} {how} after {seconds:.1f} s"
        if self._done:
            self._say(how)
        elif self._loop.stopped_by is not None:
            self._saved |= conclusion.exit_code == SAVED
            if conclusion.failure is not None:
                told = f"{name}: {conclusion.message}"
                self._failed.append(dataclasses.replace(conclusion, message=told))
        elif refused := self._refused(island, conclusion):
            see = conclusion.failure.see if conclusion.failure else ""
            told = f"{how}; given up: {refused}{see}"
            self._failed.append(dataclasses.replace(conclusion, message=told))
            if self._go_on():  # otherwise it is the last line
                self._say(told)
        else:
            wait = island.wait_seconds
            later = f" in {wait:g} s" if wait > FIRST_WAIT_SECONDS else ""
            self._say(f"{how}; started again{later} (restart {island.attempts})")
            island.starts_at = now + wait
            self._wake()

    def _refused(self, island: Island, conclusion: Conclusion) -> str | None:
        """Return why an island is not started again, or None if it is."""
        if conclusion.exit_code == USAGE:
            return "exit code 2 is a wrong flag or configuration"
        if island.early > self._restarts:
            times = counted(island.early, "end")
            return f"{times} in a row within {EARLY_SECONDS:g} s of its start"
        return None

    def _wake(self) -> None:
        """Schedule the next start."""
        times = [each.starts_at for each in self._islands if each.starts_at is not None]
        if times:
            self._loop.due[self._start_due] = min(times)

    def _start_due(self) -> None:
        for island in () if self._ending else self._islands:
            if island.starts_at is not None and island.starts_at <= time.monotonic():
                try:
                    island.start()
                except ClusterError as error:  # of no concern to the others
                    self._take(island, Conclusion(1, message=str(error)))
        self._wake()

    def _stop_rest(self) -> None:
        """Stop the islands that did not end with the first that was done."""
        for island in self._islands:
            if island.attempt is not None and island.attempt.end_with_grace():
                self._say(
                    f"another island is done; SIGTERM to island {island.number}, which has "
                    f"{self._loop.grace_seconds:g} s to exit"
                )

    def _say(self, line: str) -> None:
        self._loop.echo.say(f"replicax: {line}", error=True)


def _cause(conclusion: Conclusion) -> str:
    failure = conclusion.failure
    if failure is None:
        return conclusion.message or f"exit code {conclusion.exit_code}"
    return f"signal {failure.exit_code - 128}" if failure.exit_code > 128 else failure.cause
