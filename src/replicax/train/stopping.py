"""Whether to stop early, and when to save: decided by all processes at once, or by the only one."""

import time

from replicax.core.job import Job
from replicax.train.interrupt import Interrupt

_BETWEEN_VOTES_SECONDS = 0.5


class Stopping:
    """Turns a signal that reached some process, at whatever step, into one decision of all.

    Processes vote at calls agreed on in the vote before, about two times a second, so that nobody
    goes on to a step that another one has left out.

    Args:
        interrupt: of this process.
        job: of the processes.
        save_every_seconds: between two saves, by the clock of process 0; None for none.
    """

    def __init__(
        self, interrupt: Interrupt, job: Job, save_every_seconds: float | None = None
    ) -> None:
        self.save_due = False
        """Whether all are to save now; until they have."""
        self._interrupt, self._job, self._save_every = interrupt, job, save_every_seconds
        self._saved_at = time.monotonic()
        self._decided: int | None = None
        self._calls = 0
        self._unit = ""
        self._vote_at = self._span = 1
        self._voted_at, self._voted_call = time.monotonic(), 0

    @property
    def wanted(self) -> bool:
        """Whether to stop, as far as it is decided by all."""
        return self.signal is not None

    @property
    def signal(self) -> int | None:
        """The signal because of which all stop, as far as it is decided."""
        return self._interrupt.signal if self._job.processes == 1 else self._decided

    def saved(self) -> None:
        """All have saved, or begun to: the time to the next save runs from here."""
        self.save_due = False
        self._saved_at = time.monotonic()

    def vote(self, *, unit: str = "step") -> bool:
        """Whether to stop now; all processes ask equally often, in the same order.

        Args:
            unit: what was done since the last call, a step or `batch` of an evaluation: how long
                one takes says nothing about the other.
        """
        self._calls += 1
        if self._job.processes == 1:
            self.save_due = self.save_due or self._is_time()
        elif self._decided is None and (self._calls >= self._vote_at or unit != self._unit):
            mine = {"stop": self._interrupt.signal, "save": self._is_time(), "next": self._next()}
            if unit != self._unit:
                self._span = mine["next"] = 1
            votes = self._job.gather("whether to stop", mine)
            self._decided = next((v["stop"] for v in votes if v["stop"] is not None), None)
            self.save_due = self.save_due or votes[0]["save"]
            self._vote_at = self._calls + votes[0]["next"]
        self._unit = unit
        return self.wanted

    def _is_time(self) -> bool:
        every = self._save_every
        return every is not None and time.monotonic() - self._saved_at >= every

    def _next(self) -> int:
        """How many calls from here about `_BETWEEN_VOTES_SECONDS` will have passed.

        At most twice as many as last time: the first steps are given to devices that are still
        free, and seem to take no time.
        """
        now = time.monotonic()
        each = (now - self._voted_at) / max(self._calls - self._voted_call, 1)
        self._voted_at, self._voted_call = now, self._calls
        wanted = max(1, round(_BETWEEN_VOTES_SECONDS / max(each, 1e-6)))
        self._span = min(wanted, 2 * self._span)
        return self._span
