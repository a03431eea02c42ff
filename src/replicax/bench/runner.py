"""Runner of one case, which is compiled once and runs briefly in every round."""

import time
from collections.abc import Generator, Iterator, Mapping
from itertools import count
from typing import Any

import jax

from replicax.analysis.collectives import sums_bytes, wire_bytes_of_all_reduce
from replicax.analysis.compiled import inspect
from replicax.analysis.flops import count_flops
from replicax.analysis.hardware import chip_of_kind
from replicax.bench.bench_result import CaseResult, LayoutFigures
from replicax.bench.cases import BenchCase
from replicax.core.data.batch import Batch
from replicax.core.data.sources import as_source, can_shuffle
from replicax.core.data_parallel import DataParallel
from replicax.core.ground.job import Job
from replicax.core.ground.train_state import TrainState
from replicax.core.placement.layout import bytes_per_device
from replicax.core.placement.mesh import STAGE
from replicax.core.placement.pipeline_schedules import bubble
from replicax.core.step.coded import Coded
from replicax.core.step.loss_scale import settled
from replicax.core.step.reduction import Wire
from replicax.errors import ConfigError

UNMEASURED_STEPS = 2
"""Warm-up steps of each run, until prefetcher and caches reach a steady state."""
RUN_SECONDS = 0.25
FEWEST_STEPS, MOST_STEPS = 2, 50


def check_source(source: Any, batch_size: int, job: Job) -> bool:
    """Return whether `source` supports any batch size; raise if it cannot be benchmarked."""
    if isinstance(source, Iterator):
        raise ConfigError(
            f"the source is a {type(source).__name__}, which can be read only once, but every case "
            "reads it; pass arrays, a Grain dataset, or a loader that can be iterated repeatedly"
        )
    opened = as_source(source, batch_size, job, shuffle=False, seed=0)
    if opened is source and opened.batch_size != batch_size:
        raise ConfigError(
            f"the source has batches of {opened.batch_size} rows but batch_size={batch_size}; they "
            "must be equal: change one"
        )
    return opened is not source and opened.any_size


class Runner:
    """A case with its own `DataParallel` and its own position in the data."""

    def __init__(self, case: BenchCase, dp: DataParallel, source: Any, seed: int) -> None:
        self.case, self.dp = case, dp
        self.batches = _epochs(dp, source, case.global_batch, seed)
        self.steps = FEWEST_STEPS
        """Measured steps in each run."""
        self.run_seconds = 0.0
        """Time of one run: first an estimate, then the latest measurement."""
        self._measured_peak_bytes: int | None = None
        self._seconds_per_step: list[float] = []
        self._rows_per_second: list[float] = []
        self._input_wait_fraction: list[float] = []

    def prepare(self, state: TrainState) -> TrainState:
        """Compile the step, run `UNMEASURED_STEPS`, and choose the number of steps in a run."""
        batch = next(self.batches)
        self._compile(state, batch)
        device = self.dp.mesh.local_devices[0]
        before = device.memory_stats()
        state, _ = jax.block_until_ready(self.dp.step(state, batch))
        # A skipped step takes less time.
        state = settled(lambda state: self.dp.step(state, batch), state)
        for _ in range(UNMEASURED_STEPS - 1):  # the last one tells how long a step takes
            started = time.perf_counter()
            state, _ = jax.block_until_ready(self.dp.step(state, next(self.batches)))
        seconds = time.perf_counter() - started
        fitting = min(max(round(RUN_SECONDS / seconds), FEWEST_STEPS), MOST_STEPS)
        # All processes use process 0's count, because their steps wait for each other.
        self.steps = self.dp.job.broadcast("steps in a run", lambda: fitting)
        self.run_seconds = (UNMEASURED_STEPS + self.steps) * seconds
        if memory := self._compiled.memory:
            self._measured_peak_bytes = own_peak(before, device.memory_stats(), memory.arguments)
        return state

    def _compile(self, state: TrainState, batch: Batch) -> None:
        started = time.perf_counter()
        traced = self.dp.trace(state, batch)
        lowered = traced.lower()
        self._trace_seconds = time.perf_counter() - started
        started = time.perf_counter()
        compiled = lowered.compile()
        self._compile_seconds = time.perf_counter() - started
        self._compiled, devices = inspect(compiled), self.dp.mesh.devices
        if devices.flat[0].platform == "cpu":
            self._flops = self._compiled.flops * devices.size
        else:  # accelerators hide products in libraries' custom calls
            self._flops = count_flops(traced.jaxpr.jaxpr, devices.flat[0].platform)

    def run(self, state: TrainState) -> TrainState:
        """Run the steps of one round and record their times."""
        entered = time.perf_counter()
        for _ in range(UNMEASURED_STEPS):
            state, _ = self.dp.step(state, next(self.batches))
        jax.block_until_ready(state)
        rows, waited = 0, 0.0
        started = time.perf_counter()
        for _ in range(self.steps):
            asked = time.perf_counter()
            batch = next(self.batches)
            waited += time.perf_counter() - asked
            rows += batch.rows or 0
            state, _ = self.dp.step(state, batch)
        jax.block_until_ready(state)
        ended = time.perf_counter()
        seconds, self.run_seconds = ended - started, ended - entered
        self._seconds_per_step.append(seconds / self.steps)
        self._rows_per_second.append(rows / seconds)
        self._input_wait_fraction.append(waited / seconds)
        return state

    def result(
        self, state: TrainState, product_rate: float | None, tokens_per_row: int | None
    ) -> CaseResult:
        """Return the results of all rounds, without efficiency."""
        case, dp, compiled = self.case, self.dp, self._compiled
        padded = dp.split.padded(case.global_batch)
        reduction, least = dp.configuration.reduction, None
        if isinstance(reduction, (Wire, Coded)) and dp.layout.is_whole:
            leaves = jax.tree.leaves(state.params)
            gradient = sums_bytes(leaves, 0, reduction, case.replicas)
            least = wire_bytes_of_all_reduce(gradient, case.devices)
        chip = chip_of_kind(dp.mesh.devices.flat[0].device_kind)
        peak = chip.flops_per_second.get(dp.precision.name) if chip else None
        return CaseResult(
            mode=case.mode,
            devices=case.devices,
            global_batch=case.global_batch,
            rows_per_device=padded // case.replicas,
            padded_rows=padded - case.global_batch,
            scalings=case.scalings,
            steps_per_round=self.steps,
            seconds_per_step=tuple(self._seconds_per_step),
            rows_per_second=tuple(self._rows_per_second),
            tokens_per_row=tokens_per_row,
            input_wait_fraction=tuple(self._input_wait_fraction),
            trace_seconds=self._trace_seconds,
            compile_seconds=self._compile_seconds,
            peak_bytes_per_device=compiled.memory.peak if compiled.memory else None,
            measured_peak_bytes_per_device=self._measured_peak_bytes,
            flops_per_step=self._flops,
            peak_flops_per_second=peak and peak * case.devices,
            product_flops_per_second=product_rate,
            collectives=compiled.collectives,
            least_sent_bytes=least,
            efficiency={},
            layout=self._layout_figures(state),
        )

    def _layout_figures(self, state: TrainState) -> LayoutFigures | None:
        placed = self.case.placed
        if placed is None:
            return None
        stages = placed.mesh.shape.get(STAGE, 1)
        return LayoutFigures(
            name=str(placed),
            state_bytes_per_device=bytes_per_device(jax.tree.leaves(state)),
            sent_bytes=self._compiled.sent_bytes,
            bubble=bubble(stages, self.dp.accumulate) if stages > 1 else None,
        )


def _epochs(
    dp: DataParallel, source: Any, batch_size: int, seed: int
) -> Generator[Batch, None, None]:
    """Yield batches of `source` forever, reshuffled every epoch if the source supports it."""
    shuffle = can_shuffle(source)
    opened = as_source(source, batch_size, dp.job, shuffle=shuffle, seed=seed)
    for epoch in count():
        yield from dp.feed(opened, epoch=epoch)


def own_peak(
    before: Mapping[str, Any] | None, after: Mapping[str, Any] | None, arguments: int
) -> int | None:
    """Return the peak bytes that steps used on a device, from `memory_stats` before and after.

    Excludes memory in use before the steps, except their own `arguments`. None if the device keeps
    no such statistics, or an earlier peak of the process was at least as high.
    """
    if not before or not after or "peak_bytes_in_use" not in after:
        return None
    if after["peak_bytes_in_use"] <= before["peak_bytes_in_use"]:
        return None
    others = before["bytes_in_use"] - arguments
    return int(after["peak_bytes_in_use"] - others)
