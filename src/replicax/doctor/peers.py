"""The processes that a check compares: those of the job, or this one alone."""

import dataclasses
from typing import Any

from replicax.cluster.link import Link
from replicax.cluster.pulse import PULSE


@dataclasses.dataclass(frozen=True)
class Peers:
    """All processes of the job; one, without a link.

    What every process must do as often as all others is in `gather`, and a check gives it what it
    found or why it found nothing: it never leaves one out.
    """

    link: Link | None = None

    @property
    def process(self) -> int:
        """This one."""
        return 0 if self.link is None else self.link.process

    @property
    def processes(self) -> int:
        """How many there are."""
        return 1 if self.link is None else self.link.processes

    def gather(self, topic: str, value: Any) -> list[Any]:
        """`value` of every process, in order. All call it, in the same order of topics."""
        PULSE.reset()  # one check more is progress
        if self.link is None:
            return [value]
        return self.link.gather(self.link.unique(f"the doctor's {topic}"), value)
