"""One stream of computation and one of communication -> the time of a step."""

import heapq
from collections.abc import Iterable
from dataclasses import dataclass

from replicax.plan.network import Networks


@dataclass(frozen=True)
class Transfer:
    """Collectives that may run while the step computes.

    Args:
        kind: one of `collective.KINDS`.
        bytes: result bytes on one device, of all `count` together, as in `compiled.Collectives`.
        ready_seconds: of computation that must be done before the first can start.
        needed_seconds: of computation that can be done without the result, `ready_seconds` or more.
        count: how many equal collectives it is.
        axes: of the mesh, over which they run; None where it is all of them.
    """

    kind: str
    bytes: float
    ready_seconds: float
    needed_seconds: float
    count: int = 1
    axes: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.ready_seconds <= self.needed_seconds or self.count < 1:
            raise ValueError(f"a transfer that is needed before it is ready, or never sent: {self}")

    def seconds(self, networks: Networks) -> float:
        """All of them, one after another, on an idle network."""
        network = networks(self.axes)
        return self.count * network.time(self.kind, self.bytes / self.count).seconds


@dataclass(frozen=True)
class StepTime:
    """A step, and where its time goes."""

    seconds: float
    compute_seconds: float
    communication_seconds: float
    """Of all transfers, hidden or not."""
    exposed_seconds: float
    """In which the devices compute nothing: communication that nothing hides."""

    @property
    def efficiency(self) -> float:
        """Against the same computation without communication; 1 where there is neither."""
        return self.compute_seconds / self.seconds if self.seconds else 1.0


def step_time(
    compute_seconds: float, transfers: Iterable[Transfer], networks: Networks
) -> StepTime:
    """Simulate a step.

    Transfers run one at a time, in the order in which they become ready. Computation waits where a
    result is needed that has not arrived, and at its end for all that is still under way.

    Args:
        compute_seconds: of computation in the step; a `needed_seconds` beyond it means its end.
        transfers: in any order.
        networks: of the devices that take part, by the axes of a transfer.

    Raises:
        ValueError: for a transfer that becomes ready after the computation has ended.
    """
    exposed = free = total = 0.0
    waiting: list[tuple[float, float]] = []
    """Where a result is needed, in seconds of computation; when it arrives, by the clock."""
    for transfer in sorted(transfers, key=lambda each: each.ready_seconds):
        if transfer.ready_seconds > compute_seconds:
            raise ValueError(f"{transfer} is ready after {compute_seconds} s, the step's end")
        exposed = _waited(exposed, waiting, transfer.ready_seconds)
        seconds = transfer.seconds(networks)
        total += seconds
        free = max(free, transfer.ready_seconds + exposed) + seconds
        heapq.heappush(waiting, (min(transfer.needed_seconds, compute_seconds), free))
    exposed = _waited(exposed, waiting, compute_seconds)
    return StepTime(compute_seconds + exposed, compute_seconds, total, exposed)


def _waited(exposed: float, waiting: list[tuple[float, float]], reached: float) -> float:
    """Seconds waited once `reached` seconds of computation are done."""
    while waiting and waiting[0][0] <= reached:
        needed, arrives = heapq.heappop(waiting)
        exposed = max(exposed, arrives - needed)
    return exposed
