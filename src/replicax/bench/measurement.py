"""All cases on their way: compiled one after the other, then run in rounds."""

import contextlib
import dataclasses
import random
import sys
import time
from contextlib import AbstractContextManager
from typing import Any

import jax
import optax

from replicax.analysis.host import product_flops_per_second
from replicax.bench.cases import BenchCase, Placed
from replicax.bench.machine import only_cores
from replicax.bench.runner import Epochs, Runner
from replicax.core.data_parallel import DataParallel
from replicax.core.job import Job
from replicax.core.layout import Layout
from replicax.core.mesh import make_mesh
from replicax.core.objective import LossFunction
from replicax.core.own import StepFunction
from replicax.core.partition import Rules
from replicax.core.reduction import Reduction
from replicax.core.update import TrainState
from replicax.errors import ConfigError, LossError
from replicax.wording import duration


@dataclasses.dataclass(frozen=True)
class BenchSubject:
    """The step and the data of a measurement, whatever the case."""

    loss: LossFunction | None
    optimizer: optax.GradientTransformation | None
    step: StepFunction | None
    model: Any
    source: Any
    layout: str | Rules | Layout
    accumulate: int
    micro_shards: int
    precision: str
    reduction: str | Reduction
    seed: int
    job: Job

    def data_parallel(self, case: BenchCase) -> DataParallel:
        """The step of `case`, on the first of the attached devices."""
        placed = case.placed
        return DataParallel(
            self.loss,
            self.optimizer,
            step=self.step,
            mesh=placed.mesh if placed else make_mesh(case.devices, devices=jax.devices()),
            mode=case.mode,
            layout=placed.layout if placed else self.layout,
            accumulate=self.accumulate,
            micro_shards=self.micro_shards,
            precision=self.precision,
            reduction=self.reduction,
            job=self.job,
        )

    def check(self, case: BenchCase) -> None:
        """Raise `ConfigError` where the step of `case` cannot be, without compiling it."""
        dp = self.data_parallel(case)
        dp.abstract_state(self.model)
        dp.split.padded(case.global_batch)


def state_of(case: BenchCase) -> int | Placed:
    """Return the key of the state that a case runs on."""
    return case.placed or case.devices


class Display:
    """One line at a time, with an estimate of what is left."""

    def __init__(self, shown: bool, cases: int, rounds: int) -> None:
        self._shown, self._cases, self._rounds = shown, cases, rounds
        self._started = time.monotonic()
        self._live: Any = _live() if shown and sys.stdout.isatty() else None

    def compiling(self, number: int, case: object, run_seconds: float) -> None:
        """Case `number`, counted from 0, is next; a run of those before takes `run_seconds`."""
        left = ""
        if number:
            each = (time.monotonic() - self._started) / number
            rounds = run_seconds / number * self._cases * self._rounds
            left = f" · about {duration(each * (self._cases - number) + rounds)} left"
        self._show(f"compiling {number + 1}/{self._cases}: {case}{left}")

    def round(self, number: int, run_seconds: float) -> None:
        """Round `number`, counted from 0, is next; a run of all cases takes `run_seconds`."""
        seconds = run_seconds * (self._rounds - number)
        self._show(f"round {number + 1}/{self._rounds} · about {duration(seconds)} left")

    def part(self, number: int, parts: int, text: str) -> None:
        """Part `number` of `parts` that take as long as each other, counted from 0, is next."""
        left = ""
        if number:
            each = (time.monotonic() - self._started) / number
            left = f" · about {duration(each * (parts - number))} left"
        self._show(f"{text}{left}")

    def close(self) -> None:
        """The end; the live line goes."""
        if self._live is not None:
            self._live.stop()

    def _show(self, text: str) -> None:
        if self._live is not None:
            self._live.update(text)
        elif self._shown:
            print(text, flush=True)


def _live() -> Any:
    """A started rich line; None where rich is not installed."""
    try:
        from rich.console import Console
    except ImportError:
        return None
    # Each refresh takes a little of the processor that is being measured.
    status = Console(highlight=False).status("", spinner="dots", refresh_per_second=2)
    status.start()
    return status


class Measurement:
    """The runners of all cases, and one train state for each device count, or layout on it.

    Every mode has the same form of state, so that the modes on some devices hand one state on.
    """

    def __init__(self, subject: BenchSubject, cores: list[int], display: Display) -> None:
        self.subject = subject
        self.runners: list[Runner] = []
        self.states: dict[int | Placed, TrainState] = {}
        self._cores, self._display = cores, display

    def prepare(self, cases: list[BenchCase]) -> list[str]:
        """Compile every case and take its first steps; return a note on layouts that cannot be."""
        notes = []
        for number, case in enumerate(cases):
            self._display.compiling(number, case, self._run_seconds())
            try:
                self._prepare(case)
            except (ConfigError, LossError) as error:
                if case.placed is None or case.devices == 1:  # there no layout is at fault
                    raise
                notes.append(f"{case} is left out: {error}")
                self._drop(case)
        return notes

    def _prepare(self, case: BenchCase) -> None:
        subject, where = self.subject, state_of(case)
        dp = subject.data_parallel(case)
        if where in self.states:
            dp.abstract_state(subject.model)
        else:
            self.states[where] = dp.init(subject.model, seed=subject.seed)
        runner = Runner(case, dp, Epochs(dp, subject.source, case.global_batch, subject.seed))
        self.runners.append(runner)
        self.states[where] = runner.prepare(self.states[where])

    def _drop(self, case: BenchCase) -> None:
        """Forget what a case that failed has left, its state lest it take memory."""
        for runner in [runner for runner in self.runners if runner.case == case]:
            runner.batches.close()
            self.runners.remove(runner)
        if state_of(case) not in map(state_of, (runner.case for runner in self.runners)):
            self.states.pop(state_of(case), None)

    def measure(self, rounds: int) -> None:
        """Run every case once a round, in an order drawn anew."""
        order = random.Random(self.subject.seed)
        for number in range(rounds):
            self._display.round(number, self._run_seconds())
            for runner in order.sample(self.runners, len(self.runners)):
                where = state_of(runner.case)
                with self._on_cores_of(runner.case.devices):
                    self.states[where] = runner.run(self.states[where])

    def product_rates(self) -> dict[int, float]:
        """FLOP/s of a plain matrix product, by device count, on the cores its cases run on."""
        rates: dict[int, float] = {}
        for devices in dict.fromkeys(runner.case.devices for runner in self.runners):
            if rates and not self._cores:  # all counts have the same cores
                rates[devices] = next(iter(rates.values()))
                continue
            with self._on_cores_of(devices):
                rates[devices] = product_flops_per_second(
                    jax.local_devices()[0], self.subject.precision
                )
        return rates

    def close(self) -> None:
        """End the prefetching threads, and give the terminal back."""
        for runner in self.runners:
            runner.batches.close()
        self._display.close()

    def _run_seconds(self) -> float:
        """Time of one run of every case so far."""
        return sum(runner.run_seconds for runner in self.runners)

    def _on_cores_of(self, devices: int) -> AbstractContextManager[None]:
        """As many cores as devices where cores are given out, else all of them."""
        return only_cores(self._cores[:devices]) if self._cores else contextlib.nullcontext()
