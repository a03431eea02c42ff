"""The time of a collective operation, and what every network can tell of it."""

import math
from dataclasses import dataclass
from typing import Protocol

ALL_REDUCE = "all-reduce"
ALL_GATHER = "all-gather"
REDUCE_SCATTER = "reduce-scatter"
ALL_TO_ALL = "all-to-all"
PERMUTE = "collective-permute"
BROADCAST = "collective-broadcast"
KINDS = (ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL, PERMUTE, BROADCAST)
"""As HLO and `replicax.analysis.compiled` spell them."""


@dataclass(frozen=True)
class CollectiveTime:
    """How long one collective takes on an idle network, and by which algorithm."""

    seconds: float
    algorithm: str
    """`ring`, `tree`, `torus`, `pairwise`, `direct`, or `none` where nothing is sent."""


NOTHING_SENT = CollectiveTime(0.0, "none")


class Network(Protocol):
    """What connects the devices that take part in a collective."""

    @property
    def devices(self) -> int:
        """How many take part."""
        ...

    def time(self, kind: str, size: float) -> CollectiveTime:
        """One collective.

        Args:
            kind: one of `KINDS`.
            size: bytes of the result on one device, as `compiled.Collectives` counts them: the
                gathered array of an all-gather, the small one of a reduce-scatter.

        Raises:
            ValueError: for another kind, or fewer than 0 bytes.
        """
        ...


def check(kind: str, size: float) -> None:
    """Refuse what is no collective."""
    if kind not in KINDS:
        raise ValueError(f"{kind!r} is not a collective that is known: {', '.join(KINDS)}")
    if not (size >= 0 and math.isfinite(size)):
        raise ValueError(f"a collective of {size} bytes")
