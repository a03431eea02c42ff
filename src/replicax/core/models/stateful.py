"""Models whose functions return updated state: Equinox or Haiku state, or a codebook."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from replicax.core.ground.leaves import PyTree, kind_changes
from replicax.core.models.definition import CallContext, is_array
from replicax.errors import LossError
from replicax.text.arguments import answered


@answered
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Stateful:
    """A model with non-trainable state: the loss returns the updated `state`.

    Examples:
        >>> def loss(model, batch, key):  # the mean of all that it has seen
        ...     seen = 0.9 * model.state["mean"] + 0.1 * batch["x"].mean()
        ...     losses = (batch["x"] @ model.model["w"] - seen) ** 2
        ...     return rx.NewState(losses, {"mean": seen})
        >>> dp = rx.DataParallel(loss, optimizer)
        >>> state = dp.init(rx.Stateful(model, {"mean": jnp.zeros(())}))
        >>> state, metrics = dp.step(state, batch)
        >>> trained = dp.model(state)  # an rx.Stateful again
    """

    model: Any
    """A pytree, which may contain Equinox modules."""
    state: Any
    """A pytree of arrays of any dtype."""


@answered
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class NewState:
    """The result of a loss on a `Stateful` model: its values and the updated state.

    In evaluation the state does not change. In a custom step `rx.value_and_grad` returns it.

    Examples:
        >>> def loss(model, batch, key):  # counts the rows that it has seen
        ...     losses = (batch["x"] @ model.model["w"] - batch["y"]) ** 2
        ...     rows = model.state["rows"] + rx.row_weights(batch).sum()
        ...     return rx.NewState(losses, {"rows": rows})
        >>> dp = rx.DataParallel(loss, optimizer)
        >>> state = dp.init(rx.Stateful(model, {"rows": jnp.zeros(())}))
        >>> state, metrics = dp.step(state, batch)
        >>> def custom(state, batch, key):
        ...     net = state["net"]
        ...     means, gradient, written = rx.value_and_grad(loss)(net, batch, key)
        ...     updates, moments = optimizer.update(gradient, state["moments"], net.model)
        ...     net = rx.Stateful(optax.apply_updates(net.model, updates), written)
        ...     return {"net": net, "moments": moments}, means
        >>> dp = rx.DataParallel(step=custom)
        >>> net = rx.Stateful(model, {"rows": jnp.zeros(())})
        >>> state = dp.init({"net": net, "moments": optimizer.init(model)})
        >>> state, metrics = dp.step(state, batch)
    """

    values: Any
    """Any return value of a loss: values, or a pair of values and metrics."""
    state: Any
    """The updated `Stateful.state`, in the same dtypes."""


def values_of(returned: Any) -> Any:
    """Return the return value of a loss, without the state."""
    return returned.values if isinstance(returned, NewState) else returned


def take_state(returned: Any, extras: PyTree, context: CallContext) -> PyTree:
    """Return `extras`, the non-trainable arrays of a `Stateful`, with the state of `returned`."""
    if context.key is None:
        return extras
    if not isinstance(returned, NewState):
        raise LossError(
            "the model is an rx.Stateful, but the loss returned no state; every step must update "
            "it: return rx.NewState(values, state)"
        )
    after = jax.tree.map(lambda leaf: leaf if is_array(leaf) else None, returned.state)
    for path, was, now in kind_changes(extras.state, after):
        raise LossError(
            f"state{path} was {was} and is {now}; a loss must return state with the same arrays as "
            "before: return all of it, cast to the same dtypes"
        )
    leaves = [jnp.asarray(leaf, leaf.dtype) for leaf in jax.tree.leaves(after)]
    state = jax.tree.unflatten(jax.tree.structure(extras.state), leaves)
    return dataclasses.replace(extras, state=state)
