"""The optimizer of a model: the parameters it updates, and the gradients it reads."""

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
    """Whether its `update` takes the loss as `value`, as line searches and plateaus do."""
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
    if isinstance(optimizer, optax.GradientTransformationExtraArgs):
        try:  # it may pass on what it is given to others, so it is asked
            return Updater(optimizer, True, _read(optimizer, shapes, value=jnp.float32(0)))
        except TypeError as error:
            if "'value'" not in str(error):
                return Updater(optimizer, True, None)
    try:
        return Updater(optimizer, False, _read(optimizer, shapes))
    except Exception:  # the optimizer's own, which the step will show
        return Updater(optimizer, False, None)


def _read(
    optimizer: optax.GradientTransformation, shapes: PyTree, **more: jax.Array
) -> tuple[bool, ...] | None:
    def updates(gradient: PyTree, params: PyTree, state: PyTree) -> PyTree:
        return optimizer.update(gradient, state, params, **more)

    state = jax.eval_shape(optimizer.init, shapes)
    jaxpr = jax.make_jaxpr(updates)(shapes, shapes, state).jaxpr
    _, used = dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))
    read = tuple(used[: len(jax.tree.leaves(shapes))])
    return None if all(read) else read
