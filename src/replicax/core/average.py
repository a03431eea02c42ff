"""An average of the parameters over the steps, kept beside the optimizer's state."""

from numbers import Real
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from replicax.core.models.definition import PyTree
from replicax.core.precision import to_sum
from replicax.errors import ConfigError


class Averaged(NamedTuple):
    """State of an optimizer, and the average of the parameters that it has trained."""

    optimizer: PyTree
    average: PyTree
    """Shaped as the parameters, in float32 at least: small steps would be lost in a coarser
    dtype."""


def check_decay(decay: Any) -> None:
    """Raise `ConfigError` where `decay` is none of an average."""
    if decay is not None and not (isinstance(decay, Real) and 0 < float(decay) < 1):
        raise ConfigError(
            f"ema={decay}; it is the share of the average that a step leaves, above 0 and below 1: "
            "use 0.999, say"
        )


def averaging(
    optimizer: optax.GradientTransformation, decay: float
) -> optax.GradientTransformation:
    """Return `optimizer` with an exponential moving average of the parameters in its state.

    The average begins with the initial parameters. After each update it is `decay` times the one
    before plus `1 - decay` times the new parameters. It takes as many bytes as the parameters do in
    float32, split as they are where a layout splits the optimizer's state, and no communication.
    """

    def init(params: PyTree) -> Averaged:
        return Averaged(optimizer.init(params), jax.tree.map(to_sum, params))

    def update(
        gradient: PyTree, state: Averaged, params: PyTree = None, **more: Any
    ) -> tuple[PyTree, Averaged]:
        updates, inner = optimizer.update(gradient, state.optimizer, params, **more)
        after = jax.tree.map(to_sum, optax.apply_updates(params, updates))
        average = optax.incremental_update(after, state.average, 1 - decay)
        return updates, Averaged(inner, average)

    if isinstance(optimizer, optax.GradientTransformationExtraArgs):
        return optax.GradientTransformationExtraArgs(init, update)
    return optax.GradientTransformation(init, update)


def average_of(opt_state: PyTree, params: PyTree) -> PyTree:
    """Return the average in the state of an optimizer, in the dtypes of `params`; frozen ones too.

    Raises:
        ConfigError: there is none.
    """
    nodes = jax.tree.leaves(opt_state, is_leaf=lambda node: isinstance(node, Averaged))
    found = [node.average for node in nodes if isinstance(node, Averaged)]
    if not found:
        raise ConfigError(
            "ema=True and the state has no average of the parameters; let it have one: "
            "DataParallel(loss, optimizer, ema=0.999)"
        )

    def newest(average: Any, param: jax.Array) -> jax.Array:
        frozen = isinstance(average, optax.MaskedNode)
        return param if frozen else jnp.asarray(average, param.dtype)

    return jax.tree.map(
        newest, found[0], params, is_leaf=lambda node: isinstance(node, optax.MaskedNode)
    )
