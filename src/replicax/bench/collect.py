"""Runners that have run -> results, each compared with its mode's fewest devices."""

import math
from collections.abc import Mapping, Sequence

import jax

from replicax.analysis.collectives import sums_bytes, wire_bytes_of_all_reduce
from replicax.bench.cases import STRONG, WEAK, Case
from replicax.bench.measurement import Measurement, state_of
from replicax.bench.peak import peak_flops_per_second
from replicax.bench.result import CaseResult, LayoutFigures
from replicax.bench.runner import Runner
from replicax.bench.timing import ratios
from replicax.core.mesh import STAGE
from replicax.core.pipeline import bubble
from replicax.core.reduction import Wire, as_reduction
from replicax.core.update import TrainState


def case_results(
    measurement: Measurement, rates: Mapping[int, float], tokens_per_row: int | None
) -> tuple[CaseResult, ...]:
    """The figures of every runner, in their order.

    Args:
        measurement: after its rounds.
        rates: FLOP/s of a plain matrix product, by device count.
        tokens_per_row: for the throughput.
    """
    runners = measurement.runners
    reduction, gradient = as_reduction(measurement.subject.reduction), None
    if isinstance(reduction, Wire):
        params = jax.tree.leaves(next(iter(measurement.states.values())).params)
        gradient = sums_bytes(params, 0, reduction.dtype)
    efficiency = _efficiency_of_cases(runners)
    return tuple(
        _result(
            runner,
            tokens_per_row=tokens_per_row,
            product_rate=rates.get(runner.case.devices),
            gradient_bytes=gradient if runner.dp.layout.is_whole else None,
            efficiency=efficiency[runner.case],
            layout=_layout_figures(runner, measurement.states[state_of(runner.case)]),
        )
        for runner in runners
    )


def efficiencies(scaling: str, runs: Sequence[tuple[int, Sequence[float]]]) -> list[list[float]]:
    """Each run's efficiency, round by round, relative to the run on the fewest devices.

    Args:
        scaling: strong is `(n0 t(n0)) / (n t(n))`, weak `t(n0) / t(n)`.
        runs: devices, and seconds per step in each round, of one mode.
    """
    fewest, base = min(runs, key=lambda run: run[0], default=(1, []))
    return [
        [
            ratio * (fewest / devices if scaling == STRONG else 1.0)
            for ratio in ratios(base, seconds)
        ]
        for devices, seconds in runs
    ]


def _efficiency_of_cases(runners: Sequence[Runner]) -> dict[Case, dict[str, tuple[float, ...]]]:
    """By case and scaling."""
    found: dict[Case, dict[str, tuple[float, ...]]] = {runner.case: {} for runner in runners}
    for scaling in (STRONG, WEAK):
        for mode in dict.fromkeys(runner.case.mode for runner in runners):
            own = [r for r in runners if r.case.mode == mode and scaling in r.case.scalings]
            timed = [(runner.case.devices, runner.seconds_per_step) for runner in own]
            for runner, values in zip(own, efficiencies(scaling, timed), strict=True):
                found[runner.case][scaling] = tuple(values)
    return found


def _result(
    runner: Runner,
    *,
    tokens_per_row: int | None,
    product_rate: float | None,
    gradient_bytes: int | None,
    efficiency: dict[str, tuple[float, ...]],
    layout: LayoutFigures | None,
) -> CaseResult:
    case, dp, compiled = runner.case, runner.dp, runner.compiled
    assert compiled is not None, "a runner is prepared before it runs"
    padded = dp.split.padded(case.global_batch)
    least = None
    if gradient_bytes is not None:
        least = wire_bytes_of_all_reduce(gradient_bytes, case.devices)
    peak = peak_flops_per_second(dp.mesh.devices.flat[0].device_kind, dp.precision.name)
    memory = compiled.step.memory
    return CaseResult(
        mode=case.mode,
        devices=case.devices,
        global_batch=case.global_batch,
        rows_per_device=padded // case.replicas,
        padded_rows=padded - case.global_batch,
        scalings=case.scalings,
        steps_per_round=runner.steps,
        seconds_per_step=tuple(runner.seconds_per_step),
        rows_per_second=tuple(runner.rows_per_second),
        tokens_per_row=tokens_per_row,
        input_wait_fraction=tuple(runner.input_wait_fraction),
        trace_seconds=compiled.trace_seconds,
        compile_seconds=compiled.compile_seconds,
        peak_bytes_per_device=None if memory is None else memory.peak,
        measured_peak_bytes_per_device=runner.measured_peak_bytes,
        flops_per_step=compiled.flops,
        peak_flops_per_second=None if peak is None else peak * case.devices,
        product_flops_per_second=product_rate,
        collectives=compiled.step.collectives,
        least_sent_bytes=least,
        efficiency=efficiency,
        layout=layout,
    )


def _layout_figures(runner: Runner, state: TrainState) -> LayoutFigures | None:
    """Layout figures of a case; None unless several layouts are compared."""
    placed, compiled = runner.case.placed, runner.compiled
    if placed is None:
        return None
    assert compiled is not None, "a runner is prepared before it runs"
    stages = placed.mesh.shape.get(STAGE, 1)
    return LayoutFigures(
        name=str(placed),
        state_bytes_per_device=sum(
            math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
            for leaf in jax.tree.leaves(state)
        ),
        sent_bytes=compiled.step.sent_bytes,
        bubble=bubble(stages, runner.dp.accumulate) if stages > 1 else None,
    )
