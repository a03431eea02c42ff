"""A step whose sums are exchanged with other jobs, between two programs: the sums and the update.

The batch is cut into parts of consecutive rows. A program computes the sums of one part, as the
mode maps them onto the mesh; a job computes some parts and receives the sums of the others. A
part's number is folded into the key. Every part starts from the model state before the step, and
its statistics are averaged over the parts, as in mode `exact`.
"""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from replicax.core.data.batch import Batch
from replicax.core.ground.job import Parts, PartsExchange
from replicax.core.ground.leaves import PyTree, from_host, is_here, whole_on_host
from replicax.core.ground.train_state import TrainState
from replicax.core.models.stateful import Stateful
from replicax.core.modes.exact.fixed_tree import FixedTree, float_sums, with_means
from replicax.core.modes.step_builder import StepSpec, jitted, mapped
from replicax.core.placement.mesh import Axis, batch_shardings, replicated
from replicax.core.step.accumulate import folded
from replicax.core.step.base import Accumulator, CompiledFunction, StepSums, SumsFunction
from replicax.core.step.reduction import REDUCTIONS
from replicax.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class OfPart:
    """Sum the micro-batches of one part of a batch, as `inner` does."""

    inner: Accumulator
    number: jax.Array

    @property
    def gather(self) -> Callable[[list[jax.Array]], list[jax.Array]] | None:
        return self.inner.gather

    @property
    def row_numbers(self) -> Callable[[int], jax.Array] | None:
        return self.inner.row_numbers

    def micro_batches(self, replicas: int) -> int:
        return self.inner.micro_batches(replicas)

    def replica_key(self, key: jax.Array, axis: Axis) -> jax.Array:
        return self.inner.replica_key(key, axis)

    def __call__(
        self,
        function: SumsFunction,
        state: TrainState,
        batch: Batch,
        key: jax.Array | None,
        axis: Axis | None,
    ) -> tuple[StepSums, PyTree]:
        def of_part(params: PyTree, extras: PyTree, rows: Batch, context: Any) -> Any:
            context = dataclasses.replace(context, part=True, whole=False, row_numbers=None)
            return function(params, extras, rows, context)

        return self.inner(of_part, state, batch, folded(key, self.number), axis)


class ExchangedStep:
    """The program of `parts` as a function of the state and the whole batch, by `exchange`.

    `whole` is the same computation as one program; it is only analysed, not run. If `coded`, the
    exchange returns the sums of this job, and `coded(sums, state.islands)` those of all.
    """

    inline = None

    def __init__(
        self,
        parts: StepSpec,
        exchange: PartsExchange,
        whole: CompiledFunction[Any],
        coded: Callable[[Any, PyTree], tuple[Any, PyTree]] | None = None,
    ) -> None:
        if jax.tree.leaves(parts.shapes.reduction):
            name = getattr(parts.reduction, "name", parts.reduction)
            raise ConfigError(
                f"reduction={name!r} with islands; it keeps state for one sum between "
                "steps, and a step has a sum for each part of a batch: use 'float32'"
            )
        self.trace, self.lower = whole.trace, whole.lower
        self._exchange, self._coded = exchange, coded
        self._count = FixedTree(parts.micro_shards, REDUCTIONS["float32"]).micro_batches(1)
        where, everywhere = batch_shardings(parts.mesh), replicated(parts.mesh)
        placed = parts.total if parts.apply is None else parts.total[0]
        self._placed = placed, everywhere, everywhere
        self._take = jax.jit(partial(_rows_of_part, count=self._count), out_shardings=where)
        self._sums = jax.jit(
            partial(_sums_of_part, parts),
            in_shardings=(parts.state, where, None),
            out_shardings=self._placed,
            compiler_options=parts.compiler_options,
        )
        self._add = jax.jit(partial(jax.tree.map, jnp.add), compiler_options=parts.compiler_options)
        self._update = None
        if parts.apply is not None:
            self._update = jitted(parts, _totals, self._placed)
        self._shapes: dict[Any, Any] = {}

    def __call__(self, state: TrainState, batch: Batch) -> Any:
        shapes = self._shapes_of(state, batch)
        structure, placed = jax.tree.structure(shapes), jax.tree.broadcast(self._placed, shapes)

        def compute(number: int) -> Any:
            return self._sums(state, self._take(batch, np.int32(number)), np.int32(number))

        def received(arrays: list[np.ndarray]) -> Any:
            pairs = zip(arrays, jax.tree.leaves(placed), strict=True)
            return jax.tree.unflatten(structure, [from_host(*pair) for pair in pairs])

        parts = Parts(self._count, compute, self._add, on_host, received)
        [total] = self._exchange(parts)
        if self._coded is not None:  # it is that of this job
            total, islands = self._coded(total, state.islands)
            state = dataclasses.replace(state, islands=islands)
        return total[0] if self._update is None else self._update(state, total)

    def compiled(self, state: TrainState, batch: Batch) -> Sequence[Any]:
        """Return the compiled programs that run: the sums of one part, and the update."""
        part = jax.eval_shape(self._take, batch, 0)
        programs = [self._sums.lower(state, part, np.int32(0)).compile()]
        if self._update is not None:
            programs += self._update.compiled(state, self._shapes_of(state, batch))
        return programs

    def text(self, state: TrainState, batch: Batch) -> str:
        part = jax.eval_shape(self._take, batch, 0)
        text: str = self._sums.lower(state, part, np.int32(0)).as_text()
        if self._update is not None:
            text += self._update.text(state, self._shapes_of(state, batch))
        return text

    def cache_size(self) -> int:
        return len(self._shapes)

    def _shapes_of(self, state: TrainState, batch: Batch) -> Any:
        leaves, structure = jax.tree.flatten((state, batch))
        key = structure, *((np.shape(leaf), jnp.result_type(leaf)) for leaf in leaves)
        if key not in self._shapes:
            part = jax.eval_shape(self._take, batch, 0)
            self._shapes[key] = jax.eval_shape(self._sums, state, part, np.int32(0))
        return self._shapes[key]


def on_host(value: PyTree) -> list[np.ndarray]:
    """Return the arrays of `value`, once they are computed."""
    leaves = jax.tree.leaves(value)
    if all(map(is_here, leaves)):
        leaves = jax.device_get(leaves)  # all at once
    return [whole_on_host(leaf) for leaf in leaves]


def _rows_of_part(batch: Batch, number: jax.Array, *, count: int) -> Batch:
    rows = batch.size // count
    return batch.map_rows(lambda leaf: lax.dynamic_slice_in_dim(leaf, number * rows, rows))


def _sums_of_part(parts: StepSpec, state: TrainState, rows: Batch, number: jax.Array) -> Any:
    """Return the sums over the rows of a part, the statistics of the model after them, and 1."""
    accumulator = OfPart(parts.accumulator, number)
    found = mapped(dataclasses.replace(parts, accumulator=accumulator))(state, rows)
    if parts.apply is None:
        return found, [], jnp.ones(())
    total, extras, _ = found
    if isinstance(extras, Stateful):
        raise ConfigError(
            "a functional model's state with islands depends on the rows of one part of the batch: "
            "use mode='exact', and rx.gather them"
        )
    return total, float_sums(extras), jnp.ones(())


def _totals(state: TrainState, sums: Any) -> tuple[StepSums, PyTree, PyTree]:
    """Return what `step_sums` does, from the sums of all parts."""
    total, floats, count = sums
    return total, with_means(state.extras, floats, count), state.reduction
