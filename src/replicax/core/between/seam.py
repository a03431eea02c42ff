"""`Between`: what a step has to do with other jobs, or with replicas that train on their own.

The rest of the core asks it, and does not know what it is.
"""

from collections.abc import Callable
from typing import Any

from replicax.core.between.rounds import Rounds
from replicax.core.ground.job import PartsExchange
from replicax.core.ground.train_state import TrainState
from replicax.core.modes.step_builder import StepSpec
from replicax.core.placement.layout import Layout
from replicax.core.placement.mesh import AnyMesh
from replicax.core.step.base import CompiledFunction, StepProgram
from replicax.core.step.optimizer import Updater

Build = Callable[[StepSpec], CompiledFunction[Any]]
"""Builds a step or a score from its parts, as a mode does."""


class Between:
    """By itself: no other jobs, one state for all replicas, and every method the identity."""

    settings: Rounds | None = None
    """How often and in which form; None if that was left open."""
    exchange: PartsExchange | None = None
    """Compute the parts of a batch together with other jobs; None if there are none."""
    parts: int = 1
    """Number of parts that a batch is cut into, beside replicas and micro-batches."""
    apart = ""
    """Says where a step has only some rows of a batch; empty if it has all."""
    reshared = ""
    """Says where rows may go to another job in the next step; empty if they never do."""
    boundary_interval: int = 1
    """Number of steps from one after which it `is_boundary` to the next."""

    def is_boundary(self, step: int) -> bool:
        """Whether a run may vote, save and take others in after `step` steps; see `Rounds`."""
        return True

    def first_state(self, state: TrainState, updater: Updater, replicas: int) -> TrainState:
        """Return the state before the first step, from that of a job without others."""
        return state

    def inner_shapes(self, shapes: TrainState) -> TrainState:
        """Return the shapes that the steps of one job update, of those of a state."""
        return shapes

    def shardings(
        self, where: TrainState, shapes: TrainState, state_layout: Layout, mesh: AnyMesh
    ) -> TrainState:
        """Return the shardings of a state, from `where` they are without others."""
        return where

    def step(self, program: Any) -> StepProgram:
        """Return the step of a `Program`, with what is exchanged."""
        return self.built(program.step_spec(), program.configuration.mode.build)

    def built(self, parts: StepSpec, build: Build) -> CompiledFunction[Any]:
        """Return what a mode builds of `parts`, with the sums of other jobs."""
        return build(parts)

    def end_round(self, step: StepProgram, state: TrainState) -> TrainState:
        """Return the state after a last, shorter round of `step`."""
        return state

    def joined(self, step: StepProgram, state: TrainState) -> TrainState:
        """Return the state of another job as that of one that joins."""
        return state
