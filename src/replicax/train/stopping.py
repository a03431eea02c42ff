"""Whether to stop early: decided at one step by all processes, or by the only one."""

import time

from replicax.cluster.link import current_link
from replicax.train.interrupt import Interrupt

_BETWEEN_VOTES_SECONDS = 0.5


class Stopping:
    """Turns a Ctrl-C that reached some process, at whatever step, into one decision of all.

    Processes vote at steps agreed on in the vote before, about two times a second, so that nobody
    goes on to a step that another one has left out.
    """

    def __init__(self, interrupt: Interrupt) -> None:
        self._interrupt = interrupt
        self._decided = False
        self._vote_at = 1
        self._voted_at, self._voted_step = time.perf_counter(), 0

    @property
    def wanted(self) -> bool:
        """Whether to stop, as far as it is decided."""
        return self._interrupt.wanted if current_link() is None else self._decided

    def vote(self, step: int) -> bool:
        """Whether to stop after `step`; all processes ask after each of theirs."""
        link = current_link()
        if link is not None and step >= self._vote_at and not self._decided:
            mine = {"stop": self._interrupt.wanted, "again": self._next(step)}
            votes = link.gather(link.unique("whether to stop"), mine)
            self._decided = any(vote["stop"] for vote in votes)
            self._vote_at = votes[0]["again"]
        return self.wanted

    def _next(self, step: int) -> int:
        """The step that will be about `_BETWEEN_VOTES_SECONDS` from now."""
        now = time.perf_counter()
        each = (now - self._voted_at) / max(step - self._voted_step, 1)
        self._voted_at, self._voted_step = now, step
        return step + max(1, round(_BETWEEN_VOTES_SECONDS / max(each, 1e-6)))
