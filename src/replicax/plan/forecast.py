"""A step on some devices -> its speed on any number of them, and where more stop paying."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from replicax.core.mesh import DATA, FSDP, AnyMesh, abstract_like, abstract_mesh, replica_count
from replicax.plan.collective import REDUCE_SCATTER
from replicax.plan.critical_batch import batch_cost
from replicax.plan.network import networks
from replicax.plan.overlap import StepTime, Transfer, step_time
from replicax.plan.target import Target

MOST_DEVICES = 2**17
"""To which a curve goes on paper: the first power of two beyond 10⁵."""
PAYING_SPEEDUP = 1.1
"""Of the time to a result, by doubling the devices: what is less than this does not pay."""
SECONDS_AN_HOUR = 3600


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
        """Of all devices together."""
        return self.batch_size / self.step.seconds


def scaling_curve(
    target: Target,
    compute_seconds: float,
    transfers: Iterable[Transfer],
    rows_per_device: float,
    *,
    mesh: AnyMesh | None = None,
    fixed_batch: bool = False,
    most: int = MOST_DEVICES,
) -> tuple[ScalingPoint, ...]:
    """Forecast a step on 1, 2, 4, ... devices, and on as many as the target has.

    With the same rows on each device (weak scaling) a step's computation does not depend on their
    number. With the same batch for all (`fixed_batch`, strong scaling) it shrinks in proportion to
    the rows, which is the best case: small kernels use a chip less well; the curve ends where a
    device would have less than a row. Each transfer keeps its place in the computation and its
    bytes, but for a reduce-scatter over replicas, whose result is a device's part, and for what the
    devices of one replica send each other, which shrinks with its rows. More devices are more
    replicas: the other axes of the mesh keep their sizes.

    Args:
        target: hardware of the kind wanted, with the number of devices that `transfers` are of.
        compute_seconds: of one step on one of its devices, without communication.
        transfers: of the step on the target.
        rows_per_device: of the step on the target.
        mesh: of the target's devices; replicas alone by default.
        fixed_batch: keep the batch instead of the rows of each device.
        most: devices to go to.
    """
    mesh = abstract_mesh(target.devices) if mesh is None else mesh
    held, shared = tuple(transfers), target.devices / replica_count(mesh)
    least = target.devices // mesh.shape[DATA]
    counts = {*target.device_counts(most), target.devices}
    points = []
    for devices in sorted(count for count in counts if count % least == 0):
        shrunk = target.devices / devices if fixed_batch else 1.0
        if fixed_batch and rows_per_device * shared * shrunk < 1:
            break
        moved = [_moved(each, shrunk, target.devices / devices) for each in held]
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
    """The number of devices beyond which twice as many are no longer worth it.

    Going from n/2 devices to n pays where it is `PAYING_SPEEDUP` times as fast to the same result.
    On a curve of one batch (strong scaling) the result is a step. On a curve of one number of rows
    a device (weak scaling) more devices mean a larger batch, so what counts is the time to the same
    loss: the seconds of a step times the number of steps, which falls as 1 + B_crit/B (McCandlish
    et al. 2018, arXiv:1812.06162). Without a noise scale larger batches are taken to be worth their
    rows, so that the answer says only where communication eats the gain.

    Args:
        points: of `scaling_curve`.
        noise_scale: the gradient noise scale B_crit in rows, where a run measured it. On a curve
            of one batch it changes nothing.

    Returns:
        The largest number of devices to which it pays to go from the next smaller one.
    """
    times = {point.devices: _time_to_result(point, noise_scale) for point in points}
    counts = sorted(times)
    paying = [
        more
        for fewer, more in pairwise(counts)
        if times[fewer] / times[more] >= PAYING_SPEEDUP ** math.log2(more / fewer)
    ]
    return max(paying, default=counts[0])


def _time_to_result(point: ScalingPoint, noise_scale: float | None) -> float:
    """In a unit that cancels: seconds a row, or seconds a step times steps."""
    if noise_scale is None:
        return 1 / point.rows_per_second
    return point.step.seconds * batch_cost(point.batch_size, noise_scale).steps


def device_hours(rows: float, rows_per_second: float, devices: int) -> float:
    """Hours of one device, summed over all, to see `rows` rows.

    For a number of tokens, divide it by the tokens of a row.

    Args:
        rows: in all.
        rows_per_second: of all devices together.
        devices: how many there are.
    """
    return rows / rows_per_second * devices / SECONDS_AN_HOUR
