"""The replicas of a per-replica mode, all on one device: what they have to compute.

Each has its own rows and keys, and statistics over all of them, as in `replicax.core`. The
gradient is that of the sum over the replicas, which takes no reduction.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

from replicax.core.accumulate import Running, add_in_turn
from replicax.core.batch import Batch
from replicax.core.loss import LOSS
from replicax.core.mesh import DATA
from replicax.core.objective import Objective, Sums
from replicax.core.precision import to_sum
from replicax.core.update import update

PyTree = Any


def emulated_update(
    objective: Objective,
    optimizer: optax.GradientTransformation,
    replicas: int,
    micro_batches: int,
) -> Any:
    """A compiled `update(state, batch)` of the global batch, as so many replicas would do it."""
    function = partial(
        update,
        objective=objective,
        optimizer=optimizer,
        summation=_Replicas(micro_batches, replicas, objective),
    )
    return jax.jit(lambda state, batch: function(state, batch, None))


@dataclasses.dataclass(frozen=True)
class _Replicas(Running):
    """The sums of all replicas, one micro-batch of all of them after the other."""

    replicas: int = 1
    objective: Any = None

    def __call__(
        self,
        part: Any,
        params: PyTree,
        extras: PyTree,
        batch: Batch,
        key: jax.Array | None,
        axis: str | None,
    ) -> tuple[PyTree, PyTree]:
        """See `Summation`; `part` and `axis` are those of one device."""
        assert key is not None
        keys = jax.vmap(partial(jax.random.fold_in, key))(jnp.arange(self.replicas))

        def one(extras: PyTree, number: jax.Array, rows: Batch) -> tuple[Sums, PyTree]:
            own = jax.vmap(lambda key: jax.random.fold_in(key, number))(keys)
            return self._sums(params, extras, rows, own)

        return add_in_turn(one, extras, jax.tree.map(self._cut, batch), self.parts)

    def _cut(self, leaf: jax.Array) -> jax.Array:
        """`[rows, ...]` -> `[micro-batches, replicas, rows of one, ...]`."""
        cut = leaf.reshape(self.replicas, -1, self.parts, *leaf.shape[1:])
        return jnp.moveaxis(cut, 2, 0)

    def _sums(
        self, params: PyTree, extras: PyTree, batch: Batch, keys: jax.Array
    ) -> tuple[Sums, PyTree]:
        means: Callable[..., Any] = self.objective.means

        def total(params: PyTree) -> tuple[jax.Array, Any]:
            def of_replica(rows: Batch, key: jax.Array) -> Any:
                return means(params, extras, rows, key, DATA)

            # Not vmapped over the gradient: each replica would have a kernel of its own, and a
            # convolution of many groups takes a minute on a CPU.
            found, after = jax.vmap(of_replica, axis_name=DATA)(batch, keys)
            found = jax.tree.map(lambda leaf: jnp.sum(leaf, axis=0), found)
            return found[LOSS].total, (found, jax.tree.map(lambda leaf: leaf[0], after))

        gradient, (found, after) = jax.grad(total, has_aux=True)(params)
        return Sums(jax.tree.map(to_sum, gradient), found), after
