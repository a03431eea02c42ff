"""Whether to stop, save or evaluate: decided by all processes at once, or by the only one."""

import time
from typing import Any

from replicax.core.job import Job
from replicax.train.interrupt import Interrupt

_BETWEEN_VOTES_SECONDS = 0.5


class Stopping:
    """Turns what reached some process, at whatever step, into one decision of all.

    That is a signal, or what a hook asks for. Processes vote at calls agreed on in the vote before,
    about two times a second, so that nobody goes on to a step that another one has left out.

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
        self.evaluation_due = False
        """Whether all are to evaluate now, as some hook asked for; until they have."""
        self.why: str | None = None
        """Why the run ends here as if it were done, where some hook asked for that."""
        self._asked_to_stop: str | None = None
        self._asked_to_save = self._asked_to_evaluate = False
        self._interrupt, self._job, self._save_every = interrupt, job, save_every_seconds
        self._saved_at = time.monotonic()
        self._decided: int | None = None
        self._calls = 0
        self._unit = ""
        self._vote_at = self._span = 1
        self._voted_at, self._voted_call = time.monotonic(), 0

    @property
    def wanted(self) -> bool:
        """Whether a signal stops the run early, as far as it is decided by all."""
        return self.signal is not None

    @property
    def signal(self) -> int | None:
        """The signal because of which all stop, as far as it is decided."""
        return self._interrupt.signal if self._job.processes == 1 else self._decided

    @property
    def over(self) -> bool:
        """Whether there is to be no further step, because of a signal or of a hook."""
        return self.wanted or self.why is not None

    def stop(self, why: str) -> None:
        """Ask that the run ends as if it were done."""
        self._asked_to_stop = self._asked_to_stop or why

    def save(self) -> None:
        """Ask for a checkpoint."""
        self._asked_to_save = True

    def evaluate(self) -> None:
        """Ask for an evaluation."""
        self._asked_to_evaluate = True

    def saved(self) -> None:
        """All have saved, or begun to: the time to the next save runs from here."""
        self.save_due = False
        self._saved_at = time.monotonic()

    def vote(self, *, unit: str = "step", now: bool = False) -> bool:
        """Whether there is to be no further step; all ask equally often, in the same order.

        Args:
            unit: what was done since the last call, a step or `batch` of an evaluation: how long
                one takes says nothing about the other.
            now: whether to vote on what was asked for in any case, where all are known to be at the
                same place.
        """
        self._calls += 1
        if self._job.processes == 1:
            self._decide([self._mine(now)])
        elif not self.over and (now or self._calls >= self._vote_at or unit != self._unit):
            mine = {**self._mine(now), "next": self._next()}
            if unit != self._unit:
                self._span = mine["next"] = 1
            votes = self._job.gather("whether to stop", mine)
            self._decide(votes)
            self._vote_at = self._calls + votes[0]["next"]
        self._unit = unit
        return self.over

    def _mine(self, now: bool) -> dict[str, Any]:
        mine = {
            "signal": self._interrupt.signal,
            "stop": self._asked_to_stop,
            "save": self._asked_to_save,
            "evaluate": self._asked_to_evaluate,
            "clock": not now and self._is_time(),
        }
        self._asked_to_save = self._asked_to_evaluate = False
        return mine

    def _decide(self, votes: list[dict[str, Any]]) -> None:
        signals = [vote["signal"] for vote in votes if vote["signal"] is not None]
        reasons = [vote["stop"] for vote in votes if vote["stop"] is not None]
        self._decided = next(iter(signals), None)
        self.why = next(iter(reasons), None)
        self.save_due |= votes[0]["clock"] or any(vote["save"] for vote in votes)
        self.evaluation_due |= any(vote["evaluate"] for vote in votes)

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
