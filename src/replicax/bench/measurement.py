"""Measure all cases: compile them one after the other, then run them in rounds."""

import contextlib
import random
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax

from replicax.analysis.host import product_flops_per_second
from replicax.bench.bench_result import CaseResult, with_efficiency
from replicax.bench.cases import BenchCase, Placed
from replicax.bench.machine import only_cores
from replicax.bench.runner import Runner
from replicax.core.data_parallel import DataParallel
from replicax.core.ground.train_state import TrainState
from replicax.errors import ConfigError, LossError
from replicax.text.wording import duration


class Display:
    """A progress line with an estimate of the remaining time."""

    def __init__(self, shown: bool) -> None:
        self._shown, self._started = shown, time.monotonic()
        self._live: Any = None
        if shown and sys.stdout.isatty():
            with contextlib.suppress(ImportError):
                from rich.console import Console

                # Each refresh uses some of the processor being measured.
                status = Console(highlight=False).status("", refresh_per_second=2)
                status.start()
                self._live = status

    def show(self, text: str, left_seconds: float | None = None) -> None:
        """Show the next task and the estimated remaining time."""
        line = text if left_seconds is None else f"{text} · about {duration(left_seconds)} left"
        if self._live is not None:
            self._live.update(line)
        elif self._shown:
            print(line, flush=True)

    def left(self, number: int, parts: int) -> float | None:
        """Estimate the remaining seconds before part `number`, counted from 0, of equal parts."""
        done = time.monotonic() - self._started
        return done / number * (parts - number) if number else None

    def close(self) -> None:
        """Remove the live line."""
        if self._live is not None:
            self._live.stop()


class Measurement:
    """The runners of all cases, and one train state per device count or layout.

    All modes use the same state structure, so modes on the same devices share one state.
    With `cores`, each device is pinned to one of them; otherwise devices share all cores.
    """

    def __init__(
        self,
        data_parallel: Callable[[BenchCase], DataParallel],
        model: Any,
        source: Any,
        seed: int,
        cores: Sequence[int],
        display: Display,
    ) -> None:
        self.runners: list[Runner] = []
        self.states: dict[int | Placed, TrainState] = {}
        self._data_parallel, self._model, self._source = data_parallel, model, source
        self._seed, self._cores, self._display = seed, cores, display

    def prepare(self, cases: Sequence[BenchCase], rounds: int) -> list[str]:
        """Compile every case and run its first steps; return a note for each layout that fails."""
        notes = []
        for number, case in enumerate(cases):
            seconds_left = self._display.left(number, len(cases))
            if seconds_left is not None:
                seconds_left += self._run_seconds() / number * len(cases) * rounds
            self._display.show(f"compiling {number + 1}/{len(cases)}: {case}", seconds_left)
            try:
                self._prepare(case)
            except (ConfigError, LossError) as error:
                if case.placed is None or case.devices == 1:  # not the fault of a layout
                    raise
                notes.append(f"{case} skipped: {error}")
                self._drop(case)
        return notes

    def _prepare(self, case: BenchCase) -> None:
        dp = self._data_parallel(case)
        if case.place in self.states:
            dp.abstract_state(self._model)
        else:
            self.states[case.place] = dp.init(self._model, seed=self._seed)
        runner = Runner(case, dp, self._source, self._seed)
        self.runners.append(runner)
        self.states[case.place] = runner.prepare(self.states[case.place])

    def _drop(self, case: BenchCase) -> None:
        """Remove a failed case's runner, and free its state if no other case uses it."""
        for runner in [runner for runner in self.runners if runner.case == case]:
            runner.batches.close()
            self.runners.remove(runner)
        if case.place not in (runner.case.place for runner in self.runners):
            self.states.pop(case.place, None)

    def measure(self, rounds: int) -> None:
        """Run every case once per round, in a new random order each time."""
        order = random.Random(self._seed)
        for number in range(rounds):
            left = self._run_seconds() * (rounds - number)
            self._display.show(f"round {number + 1}/{rounds}", left)
            for runner in order.sample(self.runners, len(self.runners)):
                place = runner.case.place
                with self._on_cores_of(runner.case.devices):
                    self.states[place] = runner.run(self.states[place])

    def results(
        self, rates: dict[int, float], tokens_per_row: int | None
    ) -> tuple[CaseResult, ...]:
        """Return the results of every case, given `product_rates`."""
        results = []
        for runner in self.runners:
            state, rate = self.states[runner.case.place], rates.get(runner.case.devices)
            results.append(runner.result(state, rate, tokens_per_row))
        return with_efficiency(results)

    def product_rates(self) -> dict[int, float]:
        """Measure the FLOP/s of a plain matrix product, by device count, on the same cores."""
        rates: dict[int, float] = {}
        for devices in dict.fromkeys(runner.case.devices for runner in self.runners):
            if rates and not self._cores:  # all counts use the same cores
                rates[devices] = next(iter(rates.values()))
                continue
            with self._on_cores_of(devices):
                precision = self.runners[0].dp.precision.name
                rates[devices] = product_flops_per_second(jax.local_devices()[0], precision)
        return rates

    def close(self) -> None:
        """Stop the prefetching threads and release the terminal."""
        for runner in self.runners:
            runner.batches.close()
        self._display.close()

    def _run_seconds(self) -> float:
        return sum(runner.run_seconds for runner in self.runners)

    def _on_cores_of(self, devices: int) -> AbstractContextManager[None]:
        """Use one core per device if pinned, otherwise all cores."""
        return only_cores(self._cores[:devices]) if self._cores else contextlib.nullcontext()
