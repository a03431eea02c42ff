"""Forecast a step on any number of devices from one compute and one communication stream."""

import heapq
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from replicax.core.placement.mesh import (
    DATA,
    FSDP,
    AnyMesh,
    abstract_like,
    abstract_mesh,
    replica_count,
)
from replicax.plan.network import REDUCE_SCATTER, Networks, networks
from replicax.plan.target import Target


@dataclass(frozen=True)
class Transfer:
    """A collective that may overlap with computation."""

    kind: str
    bytes: float
    """Bytes of the result on one device."""
    ready_seconds: float
    """Seconds of computation that must be done before it can start."""
    needed_seconds: float
    """Seconds of computation that do not need the result; at least `ready_seconds`."""
    axes: tuple[str, ...] | None = None
    """Mesh axes over which it runs; None for all of them."""


@dataclass(frozen=True)
class StepTime:
    """The time of a step and its breakdown."""

    seconds: float
    compute_seconds: float
    communication_seconds: float
    """Time of all transfers, overlapped or not."""
    exposed_seconds: float
    """Communication time that does not overlap with computation."""

    @property
    def efficiency(self) -> float:
        """Speed relative to the same computation without communication; 1 for an empty step."""
        return self.compute_seconds / self.seconds if self.seconds else 1.0


def step_time(
    compute_seconds: float, transfers: Iterable[Transfer], networks: Networks
) -> StepTime:
    """Simulate a step on an otherwise idle network.

    Transfers run one at a time, in the order in which they become ready. Computation waits for each
    result when it is needed, and at the end for all transfers still in progress.
    """
    exposed = free = total = 0.0
    waiting: list[tuple[float, float]] = []
    """Seconds of computation at which a result is needed, and the time at which it arrives."""

    def wait(exposed: float, reached: float) -> float:
        """Return the total wait after `reached` seconds of computation."""
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
"""Largest device count of a curve: the first power of two beyond 10⁵."""
PAYING_SPEEDUP = 1.1
"""Smallest speedup of the time to a result for which doubling the devices pays off."""


@dataclass(frozen=True)
class ScalingPoint:
    """The forecast for one number of devices."""

    devices: int
    rows_per_device: float
    step: StepTime

    @property
    def efficiency(self) -> float:
        """Rows per second per device, relative to a single device without communication."""
        return self.step.efficiency

    @property
    def batch_size(self) -> float:
        """Rows of the global batch."""
        return self.devices * self.rows_per_device

    @property
    def rows_per_second(self) -> float:
        """Rows per second of all devices."""
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
    """Forecast a target's step on 1, 2, 4, ... devices and on the target's own device count.

    With the same rows on each device (weak scaling), computation per step does not depend on the
    device count. With the same global batch (`fixed_batch`, strong scaling), it shrinks in
    proportion to the rows, which is the best case: small kernels use a chip less efficiently. The
    curve ends where a device would have less than one row. Each transfer keeps its place in the
    computation and its bytes, except for a reduce-scatter over replicas, whose result is a device's
    shard, and for transfers within a replica, which shrink with its rows. More devices mean more
    replicas: the other mesh axes keep their sizes.
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
    """Return the transfer for `shrunk` times the computation and `parts` times the shard size."""
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
    """Return the number of devices beyond which doubling no longer pays off.

    Going from n/2 devices to n pays off if it reaches the same result `PAYING_SPEEDUP` times as
    fast, and faster than any fewer devices do. On a curve with a fixed batch (strong scaling) the
    result is one step. On a curve with fixed rows per device (weak scaling) more devices mean a
    larger batch, so the measure is the time to the same loss: seconds per step times the number of
    steps (`steps_to_a_loss`). Without a noise scale, progress is assumed proportional to the rows,
    so that the answer reflects only the cost of communication.
    """

    def seconds(point: ScalingPoint) -> float:
        """Return the time to the result, up to a constant factor."""
        if noise_scale is None:
            return 1 / point.rows_per_second
        return point.step.seconds * steps_to_a_loss(point.batch_size, noise_scale)

    paying, least = points[0].devices, seconds(points[0])
    for fewer, more in pairwise(points):
        speedup = PAYING_SPEEDUP ** math.log2(more.devices / fewer.devices)
        if seconds(fewer) / seconds(more) >= speedup and seconds(more) < least:
            paying = more.devices
        least = min(least, seconds(more))
    return paying


def steps_to_a_loss(batch_size: float, noise_scale: float) -> float:
    """Return the steps that a batch size needs to reach a loss, relative to an infinite batch.

    The result is 1 + B_crit/B; the rows are 1 + B/B_crit times the minimum, so that a batch of
    B_crit needs twice the minimum of both (McCandlish et al. 2018, "An Empirical Model of
    Large-Batch Training", arXiv:1812.06162).
    """
    return 1 + noise_scale / batch_size
