"""What a step asks of an optimizer: on what it works, what it takes, and what it reads."""

import dataclasses

import jax
import jax.numpy as jnp
import optax
from jax.interpreters.partial_eval import dce_jaxpr

from replicax.core.average import averaging
from replicax.core.models.definition import Definition, PyTree
from replicax.core.trainable import Trainable, training


@dataclasses.dataclass(frozen=True)
class Updater:
    """An optimizer, and what it asks of a step."""

    optimizer: optax.GradientTransformation
    takes_value: bool
    """Whether its `update` takes the loss as `value`."""
    read: tuple[bool, ...] | None
    """For each parameter whether it reads the gradient: not of a frozen one. None for all."""


def updater(
    optimizer: optax.GradientTransformation,
    trainable: Trainable,
    ema: float | None,
    definition: Definition,
    params: PyTree,
) -> Updater:
    """Return what updates those parameters, arrays or their shapes, that train."""
    if ema is not None:
        optimizer = averaging(optimizer, ema)
    if trainable is not None:
        optimizer = training(optimizer, trainable, definition, params)
    shapes = jax.eval_shape(lambda params: params, params)
    more = takes_value(optimizer, shapes)
    return Updater(optimizer, more, _gradients_read(optimizer, shapes, more))


def takes_value(optimizer: optax.GradientTransformation, params: PyTree) -> bool:
    """Whether `optimizer.update` takes the loss as `value`, as line searches and plateaus do."""
    if not isinstance(optimizer, optax.GradientTransformationExtraArgs):
        return False

    def call(params: PyTree) -> PyTree:
        state = optimizer.init(params)
        return optimizer.update(params, state, params, value=jnp.float32(0))

    try:  # it may pass on what it is given to others, so it is asked, not read
        jax.eval_shape(call, params)
    except TypeError as error:
        return "'value'" not in str(error)
    return True


def _gradients_read(
    optimizer: optax.GradientTransformation, shapes: PyTree, takes_value: bool
) -> tuple[bool, ...] | None:
    more = {"value": jnp.float32(0)} if takes_value else {}

    def updates(gradient: PyTree, params: PyTree, state: PyTree) -> PyTree:
        return optimizer.update(gradient, state, params, **more)

    try:
        state = jax.eval_shape(optimizer.init, shapes)
        jaxpr = jax.make_jaxpr(updates)(shapes, shapes, state).jaxpr
    except Exception:  # the optimizer's own, which the step will show
        return None
    _, used = dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))
    read = tuple(used[: len(jax.tree.leaves(shapes))])
    return None if all(read) else read
