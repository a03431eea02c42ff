"""A mode and a reduction used only by verify, as references."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from replicax.core.data.batch import Batch
from replicax.core.ground.leaves import PyTree
from replicax.core.ground.precision import to_sum
from replicax.core.mapping import Mode, by_compiler, global_view
from replicax.core.models.definition import CallContext
from replicax.core.placement.mesh import DATA, AnyMesh, Axis
from replicax.core.step.accumulate import Sequential, add_in_turn, scale_of
from replicax.core.step.base import StepSums, SumsFunction
from replicax.core.step.loss import LOSS
from replicax.core.step.objective import Objective
from replicax.core.step.reduction import Reduction, Wire


def emulated(replicas: int, objective: Objective) -> Mode:
    """Return a mode that emulates the replicas of a per-replica mode on one device.

    Each replica has its own rows and keys; statistics are over all of them. The gradient is that of
    the sum over replicas, which needs no reduction.
    """

    def accumulator(
        accumulate: int, _micro_shards: int, _mesh: AnyMesh, _reduction: Reduction
    ) -> _Replicas:
        return _Replicas(accumulate, replicas, objective)

    return Mode(
        "emulated", global_view, most_devices=1, accumulator=accumulator, reduce=by_compiler
    )


@dataclasses.dataclass(frozen=True)
class _Replicas(Sequential):
    """Accumulate the sums of all replicas, one micro-batch of all of them at a time."""

    replicas: int = 1
    objective: Any = None

    def __call__(
        self, part: SumsFunction, state: Any, batch: Batch, key: jax.Array | None, axis: Axis | None
    ) -> tuple[PyTree, PyTree]:
        """Return the sums over all rows and the extras after the step; `part` is ignored."""
        assert key is not None
        keys = jax.vmap(partial(jax.random.fold_in, key))(jnp.arange(self.replicas))

        def one(extras: PyTree, number: jax.Array, rows: Batch) -> tuple[StepSums, PyTree]:
            own = jax.vmap(lambda key: jax.random.fold_in(key, number))(keys)
            return self._sums(state.params, extras, rows, own, scale_of(state))

        rows = jax.tree.map(self._cut, batch)
        return add_in_turn(one, state.extras, rows, self.parts, dim=1)

    def _cut(self, leaf: jax.Array) -> jax.Array:
        """Reshape `[rows, ...]` to `[micro-batches, replicas, rows of one, ...]`."""
        cut = leaf.reshape(self.replicas, -1, self.parts, *leaf.shape[1:])
        return jnp.moveaxis(cut, 2, 0)

    def _sums(
        self, params: PyTree, extras: PyTree, batch: Batch, keys: jax.Array, scale: Any
    ) -> tuple[StepSums, PyTree]:
        def total(params: PyTree) -> tuple[jax.Array, Any]:
            def of_replica(rows: Batch, key: jax.Array) -> Any:
                return self.objective.loss_sums(params, extras, rows, CallContext(key, DATA))

            # The gradient is not vmapped: each replica would have its own kernel, and a
            # convolution with many groups takes a minute on a CPU.
            found, after = jax.vmap(of_replica, axis_name=DATA)(batch, keys)
            found = jax.tree.map(lambda leaf: jnp.sum(leaf, axis=0), found)
            value = found[LOSS].total if scale is None else found[LOSS].total * scale
            return value, (found, jax.tree.map(lambda leaf: leaf[0], after))

        gradient, (found, after) = jax.grad(total, has_aux=True)(params)
        return StepSums(jax.tree.map(to_sum, gradient), found), after


def _absolute(leaf: jax.Array) -> jax.Array:
    if jnp.iscomplexobj(leaf):
        return jax.lax.complex(jnp.abs(leaf.real), jnp.abs(leaf.imag))
    return jnp.abs(leaf)


@dataclasses.dataclass(frozen=True)
class _Magnitudes(Wire):
    """Sum the magnitudes of the replicas' contributions, in any per-replica mode."""

    of: Callable[[jax.Array], jax.Array] = _absolute
    """Returns the magnitude of each value of a leaf."""

    def __call__(self, sums: StepSums, state: PyTree, axis: Axis) -> tuple[StepSums, PyTree]:
        """Return the sum of the replicas' magnitudes."""
        return super().__call__(self.rounded(sums), state, axis)

    def round(self, leaf: jax.Array) -> jax.Array:
        """Return the magnitudes of a contribution; sums of magnitudes are unchanged."""
        return self.of(leaf)


def magnitudes(reduction: Reduction) -> Wire:
    """Return the sum of what the errors of `reduction` are relative to."""
    return _Magnitudes("magnitudes", of=getattr(reduction, "magnitude", _absolute))
