"""Name the process of a job that the others wait for, by times that travel with the votes.

A step takes equally long in all processes, as its reduction waits for the last to come. So each
process measures its own part: the time since the last vote without the dispatch of steps and the
waits, which is what loading, hooks, the user's loop and other programs of that host take. A device
that is slow itself is not seen, as its process waits like the others.
"""

import socket
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Protocol, TypedDict

from replicax.core.ground.in_flight import InFlight

_JUDGED_SECONDS = 10.0
"""Time over which the processes are compared."""
_SHARE = 0.05
"""Least part of a step by which a process is behind the others."""
_LEAST_SECONDS = 1e-3


class Took(TypedDict):
    """Times of one process since the last vote, in seconds."""

    host: str
    steps: int
    own: float
    waited: float
    """Waits for devices and other processes, without the dispatch of steps."""
    all: float


class VoteTimes(Protocol):
    """Travels with the votes of a process."""

    def mine(self) -> Took | None:
        """Return what this process adds to a vote; None if nothing was measured."""

    def heard(self, of_all: Sequence[Took | None]) -> None:
        """Take what all have added, in rank order."""

    def vote_ended(self) -> None:
        """Begin to measure."""


class NoTimes:
    """Adds nothing: the processes that vote do not wait for one another in each step."""

    def mine(self) -> Took | None:
        return None

    def heard(self, of_all: Sequence[Took | None]) -> None: ...
    def vote_ended(self) -> None: ...


NO_TIMES = NoTimes()


class StepTimes:
    """Measures the process itself and `say`s, once for each, which one the others wait for."""

    def __init__(self, in_flight: InFlight, say: Callable[[str], None]) -> None:
        self._in_flight, self._say = in_flight, say
        self._host = socket.gethostname()
        self._named = set[int]()
        self._heard: list[Sequence[Took]] = []
        self.vote_ended()

    def dispatched(self, steps: int, seconds: float) -> None:
        """Note steps whose dispatch took so long."""
        self._steps += steps
        self._dispatch += seconds

    def interrupted(self) -> None:
        """Note that something else than steps was done, by all processes: an evaluation, a save."""
        self._is_whole = False

    def mine(self) -> Took | None:
        if not (self._is_whole and self._steps):
            return None
        all_of_it = time.perf_counter() - self._since
        waited = self._in_flight.waited_seconds - self._waited_before
        own = max(all_of_it - waited - self._dispatch, 0.0)
        return Took(host=self._host, steps=self._steps, own=own, waited=waited, all=all_of_it)

    def heard(self, of_all: Sequence[Took | None]) -> None:
        known = [each for each in of_all if each is not None]
        if len(known) < len(of_all):
            return
        self._heard.append(known)
        if sum(votes[0]["all"] for votes in self._heard) >= _JUDGED_SECONDS:
            self._judge()
            self._heard.clear()

    def vote_ended(self) -> None:
        self._since, self._waited_before = time.perf_counter(), self._in_flight.waited_seconds
        self._steps, self._dispatch, self._is_whole = 0, 0.0, True

    def _judge(self) -> None:
        steps = sum(votes[0]["steps"] for votes in self._heard)
        by_process = list(zip(*self._heard, strict=True))
        own = [sum(each["own"] for each in votes) / steps for votes in by_process]
        slowest = max(range(len(own)), key=own.__getitem__)
        others = statistics.median(own[:slowest] + own[slowest + 1 :])
        step = sum(each["all"] for each in by_process[slowest]) / steps
        waited = sum(each["waited"] for each in by_process[slowest]) / steps
        more = own[slowest] - others
        # One that itself waits that long, as for its devices, would not come earlier.
        if more < max(_SHARE * step, _LEAST_SECONDS, waited) or slowest in self._named:
            return
        self._named.add(slowest)
        self._say(
            f"process {slowest} ({by_process[slowest][0]['host']}) is waited for: it takes "
            f"{1e3 * own[slowest]:.1f} ms between steps, the others {1e3 * others:.1f} ms; a step "
            f"takes {1e3 * step:.1f} ms in all: look at its data loading, hooks and CPUs"
        )
