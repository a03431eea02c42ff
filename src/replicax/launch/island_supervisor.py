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
    while len(ports) < (job.islands or 0):  # none is held, so that one may come twice
        ports.add(free_port())
    addresses = ",".join(f"127.0.0.1:{port}" for port in ports)

    def of(number: int) -> Island:
        place = {ISLAND: str(number), ISLANDS: addresses}
        placed = dataclasses.replace(context, env={**context.env, **place})
        names = [f"island-{number}{part}" for part in _parts(job.processes)]
        first_row = number * job.processes
        return Island(number, lambda at: Attempt(placed.starts(names, at, first_row), loop), loop)

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
        self._began = 0.0
        self._not_started: ClusterError | None = None

    def start(self) -> None:
        """Start its processes, unless a signal came in the turn of the loop that calls this.

        Raises:
            ClusterError: the system cannot start that many; of a restart, it is the next end.
        """
        if self._loop.stopped_by is not None:
            return
        self.attempts += 1
        self._began = time.monotonic()
        self.attempt = self._prepare(self.attempts)
        try:
            self.attempt.start()
        except ClusterError as error:
            if self.attempts == 1:
                raise
            self.attempt.close()  # which makes it one that is over; the others go on
            self._not_started = error

    def judge(self) -> Conclusion:
        """Return the conclusion on its attempt, which is over, and forget it."""
        attempt, error = self.attempt, self._not_started
        assert attempt is not None
        attempt.close()
        self.attempt = self._not_started = None
        return Conclusion(1, message=str(error)) if error else judge(self._loop, attempt.ended())

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
            for attempt in (island.attempt for island in self._islands if island.attempt):
                attempt.close()
        if self._failed:  # even if others are done: somebody should look at it
            return self._failed[0]
        if self._done:
            return Conclusion(0)
        if self._saved:
            return Conclusion(SAVED, message=f"{STOPPED_EARLY}; start it again to resume")
        assert self._loop.stopped_by is not None
        return Conclusion(128 + self._loop.stopped_by, message=stop_text(self._loop.stopped_by))

    def _go_on(self) -> bool:
        """Return whether an island runs or will be started again."""
        due = self._loop.due
        if self._done or self._loop.stopped_by is not None:
            for island in self._islands:
                due.pop(island.start, None)
        return any(each.attempt is not None or each.start in due for each in self._islands)

    def _take(self, island: Island, conclusion: Conclusion) -> None:
        """Decide what follows from the end of an island."""
        name, seconds = f"island {island.number}", island.lived()
        now = time.monotonic()
        if conclusion.exit_code == 0:
            self._done = True
            self._loop.due.setdefault(self._stop_rest, now + self._loop.grace_seconds)
            return
        how = STOPPED_EARLY if conclusion.exit_code == SAVED else f"died ({_cause(conclusion)})"
        line = f"{name} {how} after {seconds:.1f} s"
        if self._done:
            self._say(line)
        elif self._loop.stopped_by is not None:
            self._saved |= conclusion.exit_code == SAVED
            if conclusion.failure is not None:
                message = f"{name}: {conclusion.message}"
                self._failed.append(dataclasses.replace(conclusion, message=message))
        elif refused := self._refused(island, conclusion):
            see = conclusion.failure.see if conclusion.failure else ""
            line = f"{line}; given up: {refused}{see}"
            self._failed.append(dataclasses.replace(conclusion, message=line))
            if self._go_on():  # otherwise it is the last line
                self._say(line)
        else:
            wait = island.wait_seconds
            later = f" in {wait:g} s" if wait > FIRST_WAIT_SECONDS else ""
            self._say(f"{line}; started again{later} (restart {island.attempts})")
            self._loop.due[island.start] = now + wait

    def _refused(self, island: Island, conclusion: Conclusion) -> str | None:
        """Return why an island is not started again, or None if it is."""
        if conclusion.exit_code == USAGE:
            return "exit code 2 is a wrong flag or configuration"
        if island.early > self._restarts:
            times = counted(island.early, "end")
            return f"{times} in a row within {EARLY_SECONDS:g} s of its start"
        return None

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
