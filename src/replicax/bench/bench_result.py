"""The measured figures, case by case, and those that follow from them."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import jax

from replicax.analysis.collectives import sums_bytes, wire_bytes, wire_bytes_of_all_reduce
from replicax.analysis.compiled import Collectives
from replicax.analysis.hardware import chip_of_kind
from replicax.bench.cases import STRONG, WEAK, BenchCase
from replicax.bench.measurement import Measurement, state_of
from replicax.bench.numbers import ratios, spread
from replicax.bench.runner import Runner
from replicax.core.mesh import STAGE
from replicax.core.pipeline import bubble
from replicax.core.reduction import Wire, as_reduction
from replicax.core.update import TrainState


@dataclasses.dataclass(frozen=True)
class LayoutFigures:
    """Figures that layouts on the same devices differ in."""

    name: str
    """The layout and the axes of its mesh: `zero1`, `data=2 model=2`."""
    state_bytes_per_device: int
    """Parameters, optimizer state and what the model writes."""
    sent_bytes: float
    """Sent by each device in a step, in rings of those that each collective is between."""
    bubble: float | None
    """Share of a step in which a pipeline stage is idle, computed; None without stages."""


@dataclasses.dataclass(frozen=True)
class CaseResult:
    """One step: a mode on some devices with a global batch. Sequences have a value a round."""

    mode: str
    devices: int
    global_batch: int
    """Rows of a batch, before padding."""
    rows_per_device: int
    """With the padding."""
    padded_rows: int
    """Padding of a full batch, on all devices together."""
    scalings: tuple[str, ...]
    """`strong`, `weak`, or both."""
    steps_per_round: int
    seconds_per_step: tuple[float, ...]
    rows_per_second: tuple[float, ...]
    """Real rows, on all devices together."""
    tokens_per_row: int | None
    input_wait_fraction: tuple[float, ...]
    """Share of the measured time that the loop waited for a batch."""
    trace_seconds: float
    """Time to trace and lower the step."""
    compile_seconds: float
    peak_bytes_per_device: int | None
    """Bytes that the compiler says it needs, arguments included; None where it does not say."""
    measured_peak_bytes_per_device: int | None
    """Peak of the first device in the first steps; None where the device does not count, or an
    earlier case needed more."""
    flops_per_step: int
    """FLOPs of matrix products and convolutions, on all devices, recomputation included: what a CPU
    runs, and elsewhere what the step asks for."""
    peak_flops_per_second: float | None
    """Peak of all devices by the data sheet; None if unknown."""
    product_flops_per_second: float | None
    """Rate of a plain matrix product on the same cores; None unless the device is a CPU."""
    collectives: tuple[Collectives, ...]
    least_sent_bytes: float | None
    """Bytes that each device has to send to reduce one gradient; None where the layout or the
    reduction does not reduce it as a whole."""
    efficiency: dict[str, tuple[float, ...]]
    """By scaling, each round's; relative to the fewest devices of the same mode."""
    layout: LayoutFigures | None = None
    """Where several layouts are compared."""

    @property
    def name(self) -> str:
        """The mode, and the layout where several are compared."""
        return self.mode if self.layout is None else f"{self.mode} {self.layout.name}"

    @property
    def tokens_per_second(self) -> tuple[float, ...] | None:
        """Tokens of real rows; None if a row has no known number of tokens."""
        tokens = self.tokens_per_row
        return None if tokens is None else tuple(tokens * rate for rate in self.rows_per_second)

    @property
    def flops_per_second(self) -> float:
        """On all devices, in the median round."""
        return self.flops_per_step / spread(self.seconds_per_step)[0]

    @property
    def share_of_peak(self) -> float | None:
        """Share of the data sheet's peak."""
        return _share(self.flops_per_second, self.peak_flops_per_second)

    @property
    def share_of_product(self) -> float | None:
        """Share of a plain matrix product's rate on the same cores."""
        return _share(self.flops_per_second, self.product_flops_per_second)

    @property
    def collective_count(self) -> int:
        """Collectives of every kind in a step."""
        return sum(each.count for each in self.collectives)

    @property
    def sent_bytes(self) -> float:
        """Bytes that each device sends in a step, in rings."""
        if self.layout is not None:
            return self.layout.sent_bytes
        return sum(wire_bytes(each, self.devices) for each in self.collectives)


@dataclasses.dataclass(frozen=True)
class Bench:
    """Every mode on every device count, side by side."""

    cases: tuple[CaseResult, ...]
    environment: dict[str, Any]
    """Date, processor, cores, versions."""
    platform: str
    device_kind: str
    parameters: int
    parameter_bytes: int
    """Bytes of the trainable arrays."""
    batch_size: int
    layout: str
    accumulate: int
    precision: str
    rounds: int
    pinned: bool
    """Whether each host device had a core of its own."""
    seed: int
    seconds: float
    """Duration of the whole measurement."""
    notes: tuple[str, ...]
    """Remarks on what is not as asked, or must be known to read the figures."""
    reduction: str = "float32"
    scaled_over: Literal["devices", "processes"] = "devices"
    """The unit that cases have more and more of; each process has one device."""

    @property
    def replica(self) -> str:
        """The unit that holds one replica: a device, or a process with its only one."""
        return "device" if self.scaled_over == "devices" else "process"

    @property
    def compares_layouts(self) -> bool:
        """Whether there are several layouts, in place of one in every mode."""
        return any(case.layout is not None for case in self.cases)

    def scaling(self, name: str) -> list[CaseResult]:
        """The cases of `strong` or `weak`, by mode and then by devices."""
        return by_mode([case for case in self.cases if name in case.scalings])


def by_mode(cases: Sequence[CaseResult]) -> list[CaseResult]:
    """Mode by mode in the order they came in, each by devices and batch."""
    modes = list(dict.fromkeys(case.mode for case in cases))
    return sorted(cases, key=lambda case: (modes.index(case.mode), case.devices, case.global_batch))


def _share(rate: float, whole: float | None) -> float | None:
    return None if whole is None else rate / whole


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


def _efficiency_of_cases(
    runners: Sequence[Runner],
) -> dict[BenchCase, dict[str, tuple[float, ...]]]:
    """By case and scaling."""
    found: dict[BenchCase, dict[str, tuple[float, ...]]] = {runner.case: {} for runner in runners}
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


def peak_flops_per_second(device_kind: str, precision: str) -> float | None:
    """The data sheet's peak of one device for matrix products; None where none is known.

    Args:
        device_kind: `jax.Device.device_kind`.
        precision: `float32` (TF32 where JAX takes that by default), `bfloat16` or `float16`.
    """
    chip = chip_of_kind(device_kind)
    return None if chip is None else chip.flops_per_second.get(precision)


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
