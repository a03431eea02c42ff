"""Two transports of a round: over the mesh of one job, and between jobs.

Both compile the same functions of one island, and hand on the same bytes.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from replicax.core.between.arithmetic import SUMS, Arithmetic, IslandState
from replicax.core.between.exchanged_step import OfPart
from replicax.core.data.batch import Batch
from replicax.core.ground.job import Peers
from replicax.core.ground.leaves import PyTree, from_host, whole_on_host
from replicax.core.ground.train_state import Metrics, TrainState
from replicax.core.modes.step_builder import Jitted, StepSpec
from replicax.core.placement.mesh import (
    AnyMesh,
    Axis,
    batch_shardings,
    by_rows,
    options_on,
    replicated,
)
from replicax.core.step.base import CompiledFunction, StepProgram, no_reduction
from replicax.core.step.update import update

Sent = tuple[jax.Array, jax.Array]
"""The payload of an island, and the numbers that it sends exactly."""


class Transport(Protocol):
    """Runs functions of one island for those that this process has, and carries what they send."""

    program: CompiledFunction[Any]
    """The step that runs, a function of its `subject`."""

    def subject(self, own: IslandState) -> Any:
        """Return what `program` updates."""

    def advance(self, own: IslandState, batch: Batch) -> tuple[IslandState, Metrics]:
        """Return the state and the metrics after a step; nothing is sent."""

    def lift(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Compile `function(own, *shared)`; `own` is of one island, the result as well."""

    def share(self, sent: Sent, *, later: bool) -> Callable[[], list[Sent]]:
        """Send what `lift(sent)` returned; the result waits for that of all islands, in order.

        If `later`, do so in the background.
        """

    def carrying(self, sent: Sent) -> list[jax.stages.Compiled]:
        """Return the program that carries `sent` of these shapes, if one does."""


class BetweenJobs:
    """The transport between jobs, each of which is an island."""

    def __init__(
        self, program: StepProgram, arithmetic: Arithmetic, mesh: AnyMesh, peers: Peers | None
    ) -> None:
        self.program, self._peers, self._everywhere = program, peers, replicated(mesh)
        self._options = options_on(mesh)
        self._counted = jax.jit(arithmetic.counted, compiler_options=self._options)

    def subject(self, own: IslandState) -> TrainState:
        return own.inner

    def advance(self, own: IslandState, batch: Batch) -> tuple[IslandState, Metrics]:
        inner, metrics, _ = self.program(own.inner, batch)
        weights, loss = self._counted((own.weights, own.loss), metrics)
        metrics.pop(SUMS, None)
        return IslandState(inner, own.residual, weights, loss), metrics

    def lift(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return jax.jit(function, compiler_options=self._options)

    def share(self, sent: Sent, *, later: bool) -> Callable[[], list[Sent]]:
        arrays = [whole_on_host(array) for array in sent]
        found = None if self._peers is None else self._peers.share(arrays, later=later)

        def placed() -> list[Sent]:
            each = [arrays] if found is None else found()
            pairs = [[from_host(array, self._everywhere) for array in of] for of in each]
            return [(payload, exact) for payload, exact in pairs]

        return placed

    def carrying(self, sent: Sent) -> list[jax.stages.Compiled]:
        return []


class OverMesh:
    """The transport over the mesh of one job: each replica is an island."""

    def __init__(self, parts: StepSpec, arithmetic: Arithmetic) -> None:
        self._mesh, rows = parts.mesh, by_rows(parts.mesh)
        self._rows, self._everywhere = rows.spec, replicated(parts.mesh)

        def step(state: Any, batch: Batch, axis: Axis | None) -> Any:
            assert axis is not None
            mine: IslandState = jax.tree.map(lambda leaf: leaf[0], state)
            inner, metrics, _ = _step_of_one(parts, jax.lax.axis_index(axis))(mine.inner, batch)
            weights, loss = arithmetic.counted((mine.weights, mine.loss), metrics)
            after = IslandState(inner, mine.residual, weights, loss)
            return jax.tree.map(lambda leaf: leaf[None], (after, metrics))

        into: Any = rows, batch_shardings(parts.mesh)
        self.program: Any = Jitted[Any](
            parts.wrap(step, parts.mesh, into, rows),
            into,
            rows,
            donate_argnums=0 if parts.donate else (),
            compiler_options=parts.compiler_options,
        )
        self._options = options_on(parts.mesh)
        self._means = jax.jit(
            _means, out_shardings=self._everywhere, compiler_options=self._options
        )
        self._whole = jax.jit(lambda sent: sent, out_shardings=self._everywhere)

    def advance(self, own: IslandState, batch: Batch) -> tuple[IslandState, Metrics]:
        own, metrics = self.program(own, batch)
        return own, self._means(metrics)

    def lift(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def mapped(own: PyTree, *shared: PyTree) -> Any:
            def of_one(own: PyTree, *shared: PyTree) -> Any:
                found = function(jax.tree.map(lambda leaf: leaf[0], own), *shared)
                return jax.tree.map(lambda leaf: leaf[None], found)

            into = self._rows, *(self._everywhere.spec,) * len(shared)
            call = jax.shard_map(
                of_one, mesh=self._mesh, in_specs=into, out_specs=self._rows, check_vma=False
            )
            return call(own, *shared)

        return jax.jit(mapped, compiler_options=self._options)

    def subject(self, own: IslandState) -> IslandState:
        return own

    def share(self, sent: Sent, *, later: bool) -> Callable[[], list[Sent]]:
        payloads, exact = self._whole(sent)
        return lambda: list(zip(payloads, exact, strict=True))

    def carrying(self, sent: Sent) -> list[jax.stages.Compiled]:
        rows = NamedSharding(self._mesh, self._rows)
        placed = jax.tree.map(lambda leaf: leaf.update(sharding=rows), sent)
        return [self._whole.lower(placed).compile()]


def _step_of_one(parts: StepSpec, number: jax.Array) -> Callable[..., Any]:
    """Return the step of one island on its rows, part `number` of the batch."""
    accumulator = OfPart(parts.accumulator, number)
    sums = partial(parts.sums, axis=None, accumulator=accumulator, reduce=no_reduction)
    return sums if parts.apply is None else partial(update, sums=sums, apply=parts.apply)


def _means(metrics: Metrics) -> Metrics:
    """Return the means over all islands; of verdicts, which are no floats, the farthest from 0."""
    sums: Any = metrics.pop(SUMS, {})
    totals = jax.tree.map(lambda leaf: jnp.sum(leaf, axis=0), sums)
    found = jax.tree.map(_mean_or_verdict, metrics)
    return {**found, **{name: total.mean() for name, total in totals.items()}}


def _mean_or_verdict(each: jax.Array) -> jax.Array:
    if jnp.issubdtype(each.dtype, jnp.floating):
        return jnp.mean(each, axis=0)
    return each[jnp.argmax(jnp.abs(each.astype(jnp.int32)))]
