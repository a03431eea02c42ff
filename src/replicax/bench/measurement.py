"""All cases on their way: compiled one after the other, then run in rounds."""

import contextlib
import dataclasses
import random
from contextlib import AbstractContextManager
from typing import Any

import jax
import optax

from replicax.analysis.host import product_flops_per_second
from replicax.bench.cases import Case
from replicax.bench.cores import only_cores
from replicax.bench.display import Display
from replicax.bench.epochs import Epochs
from replicax.bench.runner import Runner
from replicax.core.data_parallel import DataParallel
from replicax.core.job import Job
from replicax.core.layout import Layout
from replicax.core.mesh import make_mesh
from replicax.core.objective import LossFunction
from replicax.core.own import StepFunction
from replicax.core.partition import Rules
from replicax.core.reduction import Reduction
from replicax.core.update import TrainState


@dataclasses.dataclass(frozen=True)
class Subject:
    """What is measured, whatever the case."""

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

    def data_parallel(self, case: Case) -> DataParallel:
        """The step of `case`, on the first of the attached devices."""
        return DataParallel(
            self.loss,
            self.optimizer,
            step=self.step,
            mesh=make_mesh(case.devices, devices=jax.devices()),
            mode=case.mode,
            layout=self.layout,
            accumulate=self.accumulate,
            micro_shards=self.micro_shards,
            precision=self.precision,
            reduction=self.reduction,
            job=self.job,
        )


class Measurement:
    """The runners of all cases, and one train state for each device count.

    Every mode has the same form of state, so that the modes on some devices hand one state on.
    """

    def __init__(self, subject: Subject, cores: list[int], display: Display) -> None:
        self.subject = subject
        self.runners: list[Runner] = []
        self.states: dict[int, TrainState] = {}
        self._cores, self._display = cores, display

    def prepare(self, cases: list[Case]) -> None:
        """Compile every case and take its first steps."""
        subject = self.subject
        for number, case in enumerate(cases):
            self._display.compiling(number, case, self._run_seconds())
            dp = subject.data_parallel(case)
            if case.devices in self.states:
                dp.abstract_state(subject.model)
            else:
                self.states[case.devices] = dp.init(subject.model, seed=subject.seed)
            batches = Epochs(dp, subject.source, case.global_batch, subject.seed)
            runner = Runner(case, dp, batches)
            self.runners.append(runner)
            self.states[case.devices] = runner.prepare(self.states[case.devices])

    def measure(self, rounds: int) -> None:
        """Run every case once a round, in an order drawn anew."""
        order = random.Random(self.subject.seed)
        for number in range(rounds):
            self._display.round(number, self._run_seconds())
            for runner in order.sample(self.runners, len(self.runners)):
                devices = runner.case.devices
                with self._on_cores_of(devices):
                    self.states[devices] = runner.run(self.states[devices])

    def product_rates(self) -> dict[int, float]:
        """FLOP/s of a plain matrix product, by device count, on the cores its cases run on."""
        rates: dict[int, float] = {}
        for devices in self.states:
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
        """Of one run of every case so far."""
        return sum(runner.run_seconds for runner in self.runners)

    def _on_cores_of(self, devices: int) -> AbstractContextManager[None]:
        """As many cores as devices where cores are given out, else all of them."""
        return only_cores(self._cores[:devices]) if self._cores else contextlib.nullcontext()
