"""Speed bounds of a step on a target, from its schedule or only its FLOPs at the chip's peaks."""

import dataclasses
from collections.abc import Iterable

from replicax.analysis.hardware import Chip
from replicax.analysis.rates import RATES, MeasuredRates
from replicax.analysis.roofline import kernel_roofline, limits, roofline_seconds
from replicax.analysis.schedule import Collective, Kernel, Schedule, Wait
from replicax.analysis.schedule import Step as ScheduleStep
from replicax.core.data_parallel import DataParallel
from replicax.core.placement.mesh import STAGE, AnyMesh, by_rows, is_data_only, replica_count
from replicax.core.placement.pipeline_schedules import bubble
from replicax.core.placement.sharding_rules import axes_of
from replicax.plan.forecast import Transfer, devices_that_pay, scaling_curve, step_time
from replicax.plan.memory_formula import MemoryFormula
from replicax.plan.network import ALL_REDUCE, networks
from replicax.plan.planned import KernelShare, Scaling, Speed
from replicax.plan.steps import StepCache, TargetStep
from replicax.plan.target import Target

_UPDATE_PASSES = 2
"""Passes of an update over the state: one read and one write."""


@dataclasses.dataclass(frozen=True)
class Work:
    """The work of one device in a step."""

    rows: int
    """Rows per replica."""
    compute_seconds: float
    transfers: tuple[Transfer, ...]
    flops: float
    """FLOPs of the device: matrix products and convolutions."""
    compute_share: float | None = None
    kernels: tuple[KernelShare, ...] = ()
    at_rates: "Work | None" = None
    """The same work at rates that such a chip has reached, if they are known."""


def work(steps: StepCache, step: TargetStep) -> Work:
    """Return one device's work in one of `steps`.

    Raises:
        ConfigError: the chip's speed is not known.
    """
    dp, rows, target = step.dp, step.need.rows, steps.target
    dtype = known_dtype(dp, target.chip)
    if step.schedule is not None:
        return work_of_schedule(step.schedule, target, rows, dtype)
    flops, sums = steps.flops(dp, rows), steps.sums_bytes(dp, 1)
    return work_by_formula(flops, step.formula, sums, target, dp)


def work_of_schedule(schedule: Schedule, target: Target, rows: int, dtype: str) -> Work:
    """Return the work of a compiled step of `rows` per replica, each kernel at the chip's peaks.

    `dtype` is used for products of unknown dtype; see `known_dtype`. With it comes the work at
    measured rates, if there are any.

    Raises:
        ConfigError: the chip's speed is not known.
    """
    rates = RATES.get(target.chip.name)
    at_rates = None if rates is None else _at(schedule, target.chip, rows, dtype, rates)
    return dataclasses.replace(_at(schedule, target.chip, rows, dtype), at_rates=at_rates)


def _at(
    schedule: Schedule, chip: Chip, rows: int, dtype: str, rates: MeasuredRates | None = None
) -> Work:
    seconds, transfers = timeline(schedule, chip, dtype, rates)
    found = limits(schedule, chip, dtype, rates)
    kernels = tuple(
        KernelShare(each.kernel.op_name or each.kernel.name, each.seconds / seconds, each.bound)
        for each in found.top
        if seconds
    )
    return Work(rows, seconds, transfers, schedule.flops, found.compute_share, kernels)


def work_by_formula(
    flops: float, formula: MemoryFormula, gradient_bytes: int, target: Target, dp: DataParallel
) -> Work:
    """Return the work from a device's FLOPs in a step and a gradient reduction without overlap.

    Raises:
        ConfigError: the chip's speed is not known.
    """
    mesh, touched = dp.mesh, _UPDATE_PASSES * formula.state
    seconds = roofline_seconds(flops, touched, target.chip, known_dtype(dp, target.chip))
    seconds /= 1 - bubble(mesh.shape.get(STAGE, 1), dp.accumulate)
    axes = None if is_data_only(mesh) else tuple(axes_of(by_rows(mesh).spec))
    reduction = Transfer(ALL_REDUCE, gradient_bytes, seconds, seconds, axes=axes)
    transfers = (reduction,) if replica_count(mesh) > 1 else ()
    return Work(formula.rows, seconds, transfers, flops)


def speed(
    work: Work,
    target: Target,
    dp: DataParallel,
    tokens_per_row: int | None = None,
    recomputed_share: float | None = None,
) -> Speed:
    """Return the lower bound on a step's time, and the speed that follows from it.

    Raises:
        ConfigError: the speed of the chip or of its links is not known.
    """
    step = step_time(work.compute_seconds, work.transfers, networks(target, dp.mesh))
    rate = work.rows * replica_count(dp.mesh) / step.seconds
    peak = target.chip.flops_per_second[known_dtype(dp, target.chip)]
    share = work.flops / (step.seconds * peak)
    return Speed(
        rows=work.rows,
        step=step,
        flops=work.flops,
        peak_share=share,
        model_share=None if recomputed_share is None else share * (1 - recomputed_share),
        compute_share=work.compute_share,
        kernels=work.kernels,
        rows_per_second=rate,
        tokens_per_second=None if tokens_per_row is None else rate * tokens_per_row,
        bubble=bubble(dp.mesh.shape.get(STAGE, 1), dp.accumulate),
        at_rates=None
        if work.at_rates is None
        else speed(work.at_rates, target, dp, tokens_per_row, recomputed_share),
    )


def scaling(work: Work, target: Target, mesh: AnyMesh, noise_scale: float | None) -> Scaling:
    """Forecast the step on other numbers of devices; `mesh` and `work` are for the whole target.

    Raises:
        ConfigError: the links between hosts are not known.
    """
    rows = work.rows * replica_count(mesh) / target.devices
    step = target, work.compute_seconds, work.transfers, rows
    weak, strong = (scaling_curve(*step, mesh=mesh, fixed_batch=each) for each in (False, True))
    return Scaling(weak, strong, devices_that_pay(weak, noise_scale), devices_that_pay(strong))


def known_dtype(dp: DataParallel, chip: Chip) -> str:
    """Return the dtype whose peak applies: the step's, or float32 if the chip does not have it."""
    return dp.precision.name if dp.precision.name in chip.flops_per_second else "float32"


def timeline(
    schedule: Schedule,
    chip: Chip,
    dtype: str = "bfloat16",
    rates: MeasuredRates | None = None,
) -> tuple[float, tuple[Transfer, ...]]:
    """Compute when each collective of a step may start and is needed, in seconds of computation.

    Kernels run one after another; each takes the longer of its FLOPs and its bytes at the chip's
    peaks, or at `rates`. A TPU's asynchronous copies onto the chip count as kernels, because they
    use the same memory bandwidth.

    Returns:
        The seconds of computation in a step, and the collectives in the order in which they are
        needed; those in a loop appear once per iteration.
    """
    now, transfers = 0.0, []
    started: dict[str, tuple[Collective, float]] = {}

    def run(steps: Iterable[ScheduleStep]) -> None:
        nonlocal now
        for step in steps:
            if isinstance(step, Kernel):
                now += step.share * kernel_roofline(step, chip, dtype, rates).seconds
            elif isinstance(step, Collective):
                started[step.name] = step, now
            elif isinstance(step, Wait):
                sent, ready = started.pop(step.collective)
                size = sent.share * sent.bytes
                transfers.append(Transfer(sent.kind, size, ready, now, axes=sent.axes))
            elif Schedule(step.steps).collectives:
                for _ in range(step.trips):
                    run(step.steps)
            else:
                before = now
                run(step.steps)
                now = before + step.trips * (now - before)

    run(schedule.steps)
    return now, tuple(transfers)
