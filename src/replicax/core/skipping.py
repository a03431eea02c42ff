"""An update that is taken or left, as each kind of device does it fastest."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from replicax.core.accumulate import zeros_like
from replicax.core.traced_for import cuda_capability
from replicax.core.update import Metrics, TrainState

Update = Callable[[TrainState], tuple[TrainState, Metrics]]


def unless(bad: jax.Array, update: Update, state: TrainState) -> tuple[TrainState, Metrics]:
    """Return `update(state)`, or where `bad` the state as it is, with metrics of 0."""
    left = state, zeros_like(jax.eval_shape(update, state)[1])
    if cuda_capability() is None:
        # A choice between two states would be slower by up to half of a step that is mostly
        # optimizer. With the branches the other way around, XLA:CPU keeps two more gradients.
        return lax.cond(~bad, update, lambda state: (state, left[1]), state)  # type: ignore[no-any-return]
    # On a GPU it is part of the optimizer's kernels, and a branch would copy the whole state.
    return jax.tree.map(lambda old, new: jnp.where(bad, old, new), left, update(state))  # type: ignore[no-any-return]
