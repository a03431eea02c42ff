"""One stream of computation and one of communication -> a step on any number of devices."""

import heapq
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from replicax.core.mesh import DATA, FSDP, AnyMesh, abstract_like, abstract_mesh, replica_count
from replicax.plan.network import REDUCE_SCATTER, Networks, networks
from replicax.plan.target import Target


@dataclass(frozen=True)
class Transfer:
    """A collective that may run while the step computes."""

    kind: str
    bytes: float
    """Bytes of the result on one device."""
    ready_seconds: float
    """Seconds of computation that must be done before it can start."""
    needed_seconds: float
    """Seconds of computation that can be done without the result, `ready_seconds` or more."""
    axes: tuple[str, ...] | None = None
    """Axes of the mesh over which it runs; None where it is all of them."""


@dataclass(frozen=True)
class StepTime:
    """A step, and where its time goes."""

    seconds: float
    compute_seconds: float
    communication_seconds: float
    """Time of all transfers, hidden or not."""
    exposed_seconds: float
    """In which the devices compute nothing: communication that nothing hides."""

    @property
    def efficiency(self) -> float:
        """Against the same computation without communication; 1 where there is neither."""
        return self.compute_seconds / self.seconds if self.seconds else 1.0


def step_time(
    compute_seconds: float, transfers: Iterable[Transfer], networks: Networks
) -> StepTime:
    """Simulate a step on an otherwise idle network.

    Transfers run one at a time, in the order in which they become ready. Computation waits where a
    result is needed that has not arrived, and at its end for all that is still under way.
    """
    exposed = free = total = 0.0
    waiting: list[tuple[float, float]] = []
    """Where a result is needed, in seconds of computation; when it arrives, by the clock."""

    def wait(exposed: float, reached: float) -> float:
        """Seconds waited once `reached` seconds of computation are done."""
        while waiting and waiting[0][0] <= reached:
            needed, arrives = heapq.heappop(waiting)
            exposed = max(exposed, arrives - needed)
        return exposed

    for transfer in sorted(transfers, key=lambda each: each.ready_seconds):
        exposed = wait(exposed, transfer.ready_seconds)
        seconds = networks(transfer.axes).time(transfer.kind, transfer.bytes)
        total += seconds
        free = max(free, transfer.ready_seconds + exposed) + seconds
        heapq.heappush(waiting, (min(transfer.needed_seconds, compute_seconds), free))
    exposed = wait(exposed, compute_seconds)
    return StepTime(compute_seconds + exposed, compute_seconds, total, exposed)


MOST_DEVICES = 2**17
"""To which a curve goes on paper: the first power of two beyond 10⁵."""
PAYING_SPEEDUP = 1.1
"""Least speedup of the time to a result for which doubling the devices pays."""


@dataclass(frozen=True)
class ScalingPoint:
    """The forecast for one number of devices."""

    devices: int
    rows_per_device: float
    step: StepTime

    @property
    def efficiency(self) -> float:
        """Rows a second of a device, over those of one device that has nobody to wait for."""
        return self.step.efficiency

    @property
    def batch_size(self) -> float:
        """Rows in a step, of all devices together."""
        return self.devices * self.rows_per_device

    @property
    def rows_per_second(self) -> float:
        """Rows of all devices together."""
        return self.batch_size / self.step.seconds


def scaling_curve(
    target: Target,
    compute_seconds: float,
    transfers: Iterable[Transfer],
    rows_per_device: float,
    *,
    mesh: AnyMesh | None = None,
    fixed_batch: bool = False,
) -> tuple[ScalingPoint, ...]:
    """Forecast a step of a target's devices on 1, 2, 4, ... of them, and on as many as it has.

    With the same rows on each device (weak scaling) a step's computation does not depend on their
    number. With the same batch for all (`fixed_batch`, strong scaling) it shrinks in proportion to
    the rows, which is the best case: small kernels use a chip less well; the curve ends where a
    device would have less than a row. Each transfer keeps its place in the computation and its
    bytes, but for a reduce-scatter over replicas, whose result is a device's part, and for what the
    devices of one replica send each other, which shrinks with its rows. More devices are more
    replicas: the other axes of the mesh keep their sizes.
    """
    mesh = abstract_mesh(target.devices) if mesh is None else mesh
    held, shared = tuple(transfers), target.devices / replica_count(mesh)
    least = target.devices // mesh.shape[DATA]
    counts = {*target.device_counts(MOST_DEVICES), target.devices}
    points = []
    for devices in sorted(count for count in counts if count % least == 0):
        parts = target.devices / devices
        shrunk = parts if fixed_batch else 1.0
        if fixed_batch and rows_per_device * shared * shrunk < 1:
            break
        moved = [_moved(each, shrunk, parts) for each in held]
        aim = target.with_devices(devices) if devices != target.devices else target
        joined = networks(aim, abstract_like(mesh, devices))
        step = step_time(compute_seconds * shrunk, moved, joined)
        points.append(ScalingPoint(devices, rows_per_device * shrunk, step))
    return tuple(points)


def _moved(transfer: Transfer, shrunk: float, parts: float) -> Transfer:
    """The transfer in a computation that takes `shrunk` times as long, with another part each."""
    size = transfer.bytes
    if transfer.axes is not None and not {DATA, FSDP}.intersection(transfer.axes):
        size *= shrunk  # of activations
    elif transfer.kind == REDUCE_SCATTER and (transfer.axes is None or DATA in transfer.axes):
        size *= parts
    return replace(
        transfer,
        bytes=size,
        ready_seconds=transfer.ready_seconds * shrunk,
        needed_seconds=transfer.needed_seconds * shrunk,
    )


def devices_that_pay(points: Sequence[ScalingPoint], noise_scale: float | None = None) -> int:
    """Return the number of devices beyond which twice as many are no longer worth it.

    Going from n/2 devices to n pays where it is `PAYING_SPEEDUP` times as fast to the same result.
    On a curve of one batch (strong scaling) the result is a step. On a curve of one number of rows
    a device (weak scaling) more devices mean a larger batch, so what counts is the time to the same
    loss: the seconds of a step times the number of steps (`steps_to_a_loss`). Without a noise scale
    larger batches are taken to be worth their rows, so that the answer says only where
    communication eats the gain.
    """

    def seconds(point: ScalingPoint) -> float:
        """To the result, in a unit that cancels."""
        if noise_scale is None:
            return 1 / point.rows_per_second
        return point.step.seconds * steps_to_a_loss(point.batch_size, noise_scale)

    paying = [
        more.devices
        for fewer, more in pairwise(points)
        if seconds(fewer) / seconds(more)
        >= PAYING_SPEEDUP ** math.log2(more.devices / fewer.devices)
    ]
    return max(paying, default=points[0].devices)


def steps_to_a_loss(batch_size: float, noise_scale: float) -> float:
    """Return the steps that a batch size takes to a loss, over those of an endless batch.

    1 + B_crit/B, and 1 + B/B_crit times the fewest rows, so that a batch of B_crit takes twice the
    least of both (McCandlish et al. 2018, "An Empirical Model of Large-Batch Training",
    arXiv:1812.06162).
    """
    return 1 + noise_scale / batch_size
