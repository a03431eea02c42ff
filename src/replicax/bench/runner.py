"""One case, compiled once, and run a little in every round."""

import dataclasses
import time
from collections.abc import Iterator, Mapping
from typing import Any

import jax

from replicax.analysis.compiled import CompiledStep, inspect
from replicax.analysis.flops import count_flops
from replicax.bench.cases import BenchCase
from replicax.core.batch import Batch
from replicax.core.data_parallel import DataParallel
from replicax.core.job import Job
from replicax.core.scaling import settled
from replicax.core.sources import Source, as_source, can_shuffle
from replicax.core.update import TrainState
from replicax.errors import ConfigError

UNMEASURED_STEPS = 2
"""At the start of a run, until the prefetcher and the caches are as they are in training."""
RUN_SECONDS = 0.25
FEWEST_STEPS, MOST_STEPS = 2, 50


@dataclasses.dataclass(frozen=True)
class Compiled:
    """The compiled step, and how long compiling it took."""

    trace_seconds: float
    compile_seconds: float
    step: CompiledStep
    flops: int
    """FLOPs of the products on all devices: what a CPU runs, and elsewhere what the step asks
    for."""


class Epochs:
    """The batches of `source` without an end, each epoch shuffled anew where the source can."""

    def __init__(self, dp: DataParallel, source: Any, batch_size: int, seed: int) -> None:
        shuffle = can_shuffle(source)
        self._dp = dp
        self._source: Source = as_source(source, batch_size, dp.job, shuffle=shuffle, seed=seed)
        self._epoch = 0
        self._batches: Iterator[Batch] | None = None
        self.wait_seconds = 0.0
        """Time that `next` has taken, the change of epochs included."""

    def __iter__(self) -> "Epochs":
        return self

    def __next__(self) -> Batch:
        started = time.perf_counter()
        if self._batches is None:
            self._batches = iter(self._dp.feed(self._source, epoch=self._epoch))
        batch = next(self._batches, None)
        if batch is None:
            self._epoch += 1
            self._batches = iter(self._dp.feed(self._source, epoch=self._epoch))
            batch = next(self._batches)  # no epoch is empty
        self.wait_seconds += time.perf_counter() - started
        return batch

    def close(self) -> None:
        """End the thread that makes batches ahead."""
        close = getattr(self._batches, "close", None)
        if close is not None:
            close()


def check_source(source: Any, batch_size: int, job: Job) -> bool:
    """Whether `source` can be cut into batches of any size.

    Raises:
        ConfigError: it can be read once only, or gives batches of another size.
    """
    if isinstance(source, Iterator):
        raise ConfigError(
            f"the source is a {type(source).__name__}, which can be read once, and every case "
            "reads it; give arrays, a Grain dataset, or a loader that can be iterated again"
        )
    opened = as_source(source, batch_size, job, shuffle=False, seed=0)
    if opened is source and opened.batch_size != batch_size:
        raise ConfigError(
            f"the source has batches of {opened.batch_size} rows and batch_size={batch_size}; they "
            "are the same: change one"
        )
    return opened is not source and opened.any_size


class Runner:
    """A case and what it needs to run: its own `DataParallel`, and its own place in the data."""

    def __init__(self, case: BenchCase, dp: DataParallel, batches: Epochs) -> None:
        self.case, self.dp, self.batches = case, dp, batches
        self.compiled: Compiled | None = None
        self.measured_peak_bytes: int | None = None
        self.steps = FEWEST_STEPS
        """Measured in each run."""
        self.run_seconds = 0.0
        """Time of one run: an estimate, then the newest."""
        self.seconds_per_step: list[float] = []
        self.rows_per_second: list[float] = []
        self.input_wait_fraction: list[float] = []

    def prepare(self, state: TrainState) -> TrainState:
        """Compile the step, take `UNMEASURED_STEPS`, and see how many a run has."""
        batch = next(self.batches)
        self.compiled = _compile(self.dp, state, batch)
        device = self.dp.mesh.local_devices[0]
        before = device.memory_stats()
        state, _ = jax.block_until_ready(self.dp.step(state, batch))
        # A step that is skipped takes less time.
        state = settled(lambda state: self.dp.step(state, batch), state)
        for _ in range(UNMEASURED_STEPS - 1):
            started = time.perf_counter()
            state, _ = jax.block_until_ready(self.dp.step(state, next(self.batches)))
        seconds = time.perf_counter() - started
        # Process 0's, in all processes of a job: their steps wait for each other.
        self.steps = self.dp.job.broadcast("steps in a run", lambda: steps_in_a_run(seconds))
        self.run_seconds = (UNMEASURED_STEPS + self.steps) * seconds
        memory = self.compiled.step.memory
        if memory is not None:
            self.measured_peak_bytes = own_peak(before, device.memory_stats(), memory.arguments)
        return state

    def run(self, state: TrainState) -> TrainState:
        """The steps of one round; keeps their figures."""
        entered = time.perf_counter()
        for _ in range(UNMEASURED_STEPS):
            state, _ = self.dp.step(state, next(self.batches))
        jax.block_until_ready(state)
        rows, waited = 0, self.batches.wait_seconds
        started = time.perf_counter()
        for _ in range(self.steps):
            batch = next(self.batches)
            rows += batch.rows or 0
            state, _ = self.dp.step(state, batch)
        jax.block_until_ready(state)
        ended = time.perf_counter()
        seconds, self.run_seconds = ended - started, ended - entered
        self.seconds_per_step.append(seconds / self.steps)
        self.rows_per_second.append(rows / seconds)
        self.input_wait_fraction.append((self.batches.wait_seconds - waited) / seconds)
        return state


def steps_in_a_run(seconds_per_step: float) -> int:
    """Steps that take about `RUN_SECONDS`."""
    return min(max(round(RUN_SECONDS / seconds_per_step), FEWEST_STEPS), MOST_STEPS)


def own_peak(
    before: Mapping[str, Any] | None, after: Mapping[str, Any] | None, arguments: int
) -> int | None:
    """Bytes that some steps needed on a device at most, without what else lay there before them.

    Args:
        before: the device's `memory_stats()` before the steps.
        after: the same afterwards. Its peak is that of the process.
        arguments: bytes of the steps' own arguments, which lay there before, too.

    Returns:
        None where the device keeps no such figures, or an earlier peak was as high.
    """
    if not before or not after or "peak_bytes_in_use" not in after:
        return None
    if after["peak_bytes_in_use"] <= before["peak_bytes_in_use"]:
        return None
    others = before["bytes_in_use"] - arguments
    return int(after["peak_bytes_in_use"] - others)


def _compile(dp: DataParallel, state: TrainState, batch: Any) -> Compiled:
    """Lower and compile what `dp.step` then runs."""
    started = time.perf_counter()
    traced = dp.trace(state, batch)
    lowered = traced.lower()
    lowered_at = time.perf_counter()
    compiled = lowered.compile()
    seconds = time.perf_counter() - lowered_at
    step, devices = inspect(compiled), dp.mesh.devices
    if devices.flat[0].platform == "cpu":
        flops = step.flops * devices.size
    else:  # accelerators hide products in libraries' custom calls
        flops = count_flops(traced.jaxpr.jaxpr, devices.flat[0].platform)
    return Compiled(lowered_at - started, seconds, step, flops)
