"""Several steps in one call: one program where a step is one, else one step after another."""

import dataclasses
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from replicax.core.call_checks import TRAINING, CallChecks
from replicax.core.data.batch import Batch
from replicax.core.data.share import Batches
from replicax.core.first_step.memory_check import check_fits
from replicax.core.ground.train_state import Metrics, TrainState
from replicax.core.placement.mesh import batch_shardings
from replicax.core.program import Program
from replicax.core.step.base import StepProgram
from replicax.core.step.loss import LOSS

_Step = Callable[[TrainState, Batch], tuple[TrainState, dict[str, Any]]]


class SeveralSteps:
    """Calls of several steps of one program."""

    def __init__(self, program: Program, checks: CallChecks) -> None:
        self._program, self._checks = program, checks
        self._whole: dict[Any, StepProgram | None] = {}

    def prepare(self, state: TrainState, batches: Batches) -> StepProgram | None:
        """Check each step, compile, and return the program of all; None if it takes several."""
        self._checks.check_state(state, batches.stack)
        shapes = tuple((leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(batches.stack))
        key = shapes, frozenset(batches.rows), batches.feed_padding
        if key not in self._whole:
            self._whole[key] = self._checked(state, batches)
        return self._whole[key]

    def one_by_one(
        self, state: TrainState, batches: Batches, step: _Step
    ) -> tuple[TrainState, Any]:
        """Return what `step` does with each batch: the state, and metrics by step."""
        told = []
        for batch in self._each(batches):
            state, metrics = step(state, batch)
            told.append(metrics)
        return state, self._stack(told)

    def run(self, program: StepProgram, state: TrainState, batches: Batches) -> Any:
        """Return the state, metrics and rows of all steps, dispatched without waiting."""
        job = self._program.configuration.job
        job.move()
        job.in_flight.enter(len(batches))
        state, means, rows = program(state, batches.stack)
        job.in_flight.add(means[LOSS], len(batches))
        self._checks.check_result(state, means)
        return state, means, rows

    def _checked(self, state: TrainState, batches: Batches) -> StepProgram | None:
        """Check a step of each number of real rows; None if one is computed without its padding."""
        step, first = self._program.step, {rows: n for n, rows in enumerate(batches.rows)}
        for number in sorted(first.values()):
            batch = self._one(batches, number)
            if self._checks.check(TRAINING, step, state, batch) is not batch:
                return None
        if (steps := self._program.steps) is None:  # then each step needs what one alone does
            self._checks.check_memory(state, batch)
        else:
            compiled = steps.compiled(state, batches.stack)
            check_fits(compiled, self._program.configuration.mesh, batches.stack.mask.size)
        return steps

    def _each(self, batches: Batches) -> Iterator[Batch]:
        return (self._one(batches, number) for number in range(len(batches)))

    def _one(self, batches: Batches, number: int) -> Batch:
        batch: Batch = self._slice(batches.stack, np.int32(number))
        rows = batches.rows[number]
        return dataclasses.replace(batch, rows=rows, feed_padding=batches.feed_padding)

    @cached_property
    def _slice(self) -> Callable[..., Batch]:
        def take(stack: Batch, number: jax.Array) -> Batch:
            return jax.tree.map(lambda leaf: leaf[number], stack)  # type: ignore[no-any-return]

        return jax.jit(take, out_shardings=batch_shardings(self._program.mesh))

    @cached_property
    def _stack(self) -> Callable[[list[Metrics]], Metrics]:
        return jax.jit(lambda told: jax.tree.map(lambda *values: jnp.stack(values), *told))
