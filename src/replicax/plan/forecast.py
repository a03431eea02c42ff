"""One stream of computation and one of communication -> a step on any number of devices."""

import heapq
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from replicax.core.mesh import DATA, FSDP, AnyMesh, abstract_like, abstract_mesh, replica_count
from replicax.errors import ConfigError
from replicax.plan.network import REDUCE_SCATTER, Networks, networks
from replicax.plan.target import Target


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
        return self.count * network.time(self.kind, self.bytes / self.count)


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


@dataclass(frozen=True)
class BatchCost:
    """Cost of training to a given loss, against the least possible."""

    steps: float
    """Over the fewest steps, those of an endless batch."""
    rows: float
    """Over the fewest rows, those of the smallest batch."""


def batch_cost(batch_size: float, noise_scale: float) -> BatchCost:
    """Steps and rows that a batch size takes to reach a loss.

    steps = S_min (1 + B_crit/B) and rows = E_min (1 + B/B_crit), so a batch of B_crit takes twice
    the least of both (McCandlish et al. 2018, "An Empirical Model of Large-Batch Training",
    arXiv:1812.06162).

    Args:
        batch_size: rows of a step.
        noise_scale: the gradient noise scale, B_crit, in rows.

    Raises:
        ConfigError: one of them is not positive.
    """
    if not (batch_size > 0 and noise_scale > 0):
        raise ConfigError(
            f"a batch of {batch_size} rows with a noise scale of {noise_scale}: both must be "
            "positive; measure one with `replicax train --measure-noise-scale`"
        )
    return BatchCost(1 + noise_scale / batch_size, 1 + batch_size / noise_scale)


@dataclass(frozen=True)
class LearningRates:
    """The learning rate of one batch size carried over to another."""

    linear: float
    """In proportion to the batch, for SGD with warm-up (Goyal et al. 2017, arXiv:1706.02677)."""
    square_root: float
    """In proportion to its root: for Adam (Malladi et al. 2022, arXiv:2205.10287), and what keeps
    the variance of SGD's steps (Krizhevsky 2014, arXiv:1404.5997)."""


def learning_rates(learning_rate: float, batch_size: float, planned: float) -> LearningRates:
    """Where to start looking for the learning rate of another batch size.

    Both rules hold for batches well below the critical one; beyond it neither does.

    Args:
        learning_rate: that was tuned for `batch_size` rows.
        batch_size: rows of a step there.
        planned: rows of a step planned.

    Raises:
        ConfigError: a batch without rows.
    """
    if batch_size <= 0 or planned <= 0:
        raise ConfigError(f"batches of {batch_size} and {planned} rows; a batch has 1 or more")
    ratio = planned / batch_size
    return LearningRates(learning_rate * ratio, learning_rate * math.sqrt(ratio))


MOST_DEVICES = 2**17
"""To which a curve goes on paper: the first power of two beyond 10⁵."""
PAYING_SPEEDUP = 1.1
"""Least speedup of the time to a result for which doubling the devices pays."""
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
