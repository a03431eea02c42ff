"""Split any model into params, its trainable arrays, and extras, its other arrays.

A pytree that contains more than a model raises an error that says what to pass instead.
"""

import inspect
import sys
from collections.abc import Mapping
from typing import Any

import jax

from replicax.core.ground.leaves import PyTree, by_path
from replicax.core.ground.train_state import TrainState, check_unused
from replicax.core.models.definition import SplitModel, is_array, is_trainable
from replicax.core.models.pytree import split_pytree
from replicax.core.models.stateful import Stateful
from replicax.errors import ConfigError

# By public name, to avoid importing libraries for this check.
_INSTEAD = {
    ("replicax", "TrainState"): "pass dp.model(state)",
    ("optax", "GradientTransformation"): "pass it to DataParallel, and pass only the model here",
    ("flax.training.train_state", "TrainState"): "pass module.bind({'params': state.params}), with "
    "its batch_stats if any, and pass the optimizer to DataParallel",
    ("flax.nnx", "Optimizer"): "pass the NNX model, and the optax optimizer to DataParallel",
    ("flax.nnx", "Module"): "pass one NNX module containing all: nnx.Dict(...) or nnx.List([...])",
}


def split_model(model: Any) -> SplitModel:
    """Return the definition, params and extras of a model of any kind.

    Raises `ConfigError` if nothing is trainable, or it is no model; `StateError` if donated.
    """
    definition, params, extras = _split(model)
    if not jax.tree.leaves(params):
        leaves = jax.tree.leaves(extras) or jax.tree.leaves(model)
        kinds = sorted({type(leaf).__name__ for leaf in leaves})
        fix = "convert it with jnp.asarray"
        if isinstance(model, type) or inspect.isroutine(model):
            fix = f"pass what {model.__name__} returns, or its parameters"
        raise ConfigError(
            f"the model has {len(leaves)} leaves ({', '.join(kinds) or 'none'}) and 0 trainable "
            f"arrays; a trainable array has a floating-point dtype: {fix}"
        )
    check_unused((params, extras))
    return definition, params, extras


def refuse_state(model: Any) -> None:
    """Raise `ConfigError` if a state is given for a model."""
    if isinstance(model, TrainState):
        raise ConfigError(f"the model {_reason(model)}")


def _split(model: Any) -> SplitModel:
    # A model cannot come from a library that was never imported, so import none.
    if "flax.nnx" in sys.modules:
        import flax.nnx

        if isinstance(model, flax.nnx.Module):
            from replicax.core.models.nnx import split_nnx

            return split_nnx(model)
    if "flax.linen" in sys.modules:
        import flax.linen

        if isinstance(model, flax.linen.Module):
            from replicax.core.models.linen import split_linen

            return split_linen(model)
    trained = model.model if isinstance(model, Stateful) else model
    _refuse_foreign(trained)
    if "equinox" in sys.modules:
        from replicax.core.models.equinox import holds_equinox, split_equinox

        if holds_equinox(model):
            return split_equinox(model)
    _refuse_numbers(trained)
    return split_pytree(model)


def _refuse_foreign(model: PyTree) -> None:
    """Raise `ConfigError` if a pytree is or contains arrays to train that are not parameters."""

    def look(path: Any, node: Any) -> bool:
        reason = _reason(node)
        if reason:
            where = f"model{jax.tree_util.keystr(path)}" if path else "the model"
            raise ConfigError(f"{where} {reason}")
        return False

    jax.tree_util.tree_leaves_with_path(model, is_leaf=look, is_leaf_takes_path=True)


def _refuse_numbers(model: PyTree) -> None:
    """Raise `ConfigError` if a leaf is a Python number that JAX would differentiate."""
    for path, leaf in by_path(model).items():
        if isinstance(leaf, float | complex) and not is_array(leaf):
            raise ConfigError(
                f"model{path} is the Python number {leaf}; only arrays train, and jax.grad would "
                "train it: use jnp.asarray, and trainable= or the loss for what stays constant"
            )


def _reason(node: Any) -> str | None:
    for (module, name), instead in _INSTEAD.items():
        if _is(node, module, name):
            return f"is an instance of {module}.{name}; {instead}"
    kind = type(node).__name__
    if type(node).__module__.startswith("optax.") and kind.endswith("State"):
        return f"is an optax {kind}, which is not trainable; pass only the model"
    if _is(node, "flax.nnx", "Variable") and not _is(node, "flax.nnx", "Param"):
        return f"is an nnx.{kind}, which is not trainable; pass the NNX model, not its state"
    if _is(node, "flax.linen", "Module") and node.scope is not None:
        return f"is a bound {kind}; pass one bound Linen module that has all others as submodules"
    if isinstance(node, Mapping) and set(node) == {"average", "counter", "hidden"}:
        return "is state of a Haiku module, which is not trainable; pass only the params"
    if isinstance(node, Mapping) and "params" in node:
        others = [name for name in node if name != "params" and _trains(node[name])]
        if others:
            return (
                f"has params and {', '.join(map(str, others))}, like Linen variables, of "
                "which only params train; pass module.bind(variables)"
            )
    return None


def _is(node: Any, module: str, name: str) -> bool:
    return isinstance(node, getattr(sys.modules.get(module), name, ()))


def _trains(tree: Any) -> bool:
    return isinstance(tree, Mapping) and any(map(is_trainable, jax.tree.leaves(tree)))
