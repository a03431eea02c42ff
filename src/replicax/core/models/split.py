"""Any model <-> (params, extras): its trainable arrays, and its other arrays.

A pytree that holds more than a model is refused, with what to pass instead.
"""

import sys
from collections.abc import Mapping
from typing import Any

import jax

from replicax.core.models.definition import Parts, PyTree, is_trainable
from replicax.core.models.pytree import split_pytree
from replicax.core.models.stateful import Stateful
from replicax.core.refused import check_unused
from replicax.errors import ConfigError

# By public name, because a library that was never imported is not imported for this.
_INSTEAD = {
    ("replicax", "TrainState"): "pass dp.model(state), or give the state to dp.step",
    ("optax", "GradientTransformation"): "give it to DataParallel, and pass the model alone",
    ("flax.training.train_state", "TrainState"): "pass module.bind({'params': state.params}), with "
    "its batch_stats if it has any, and give DataParallel the optimizer",
    ("flax.nnx", "Optimizer"): "pass the NNX model, and give DataParallel the optax optimizer",
    ("flax.nnx", "Module"): "pass one NNX module that holds all: nnx.Dict(...) or nnx.List([...])",
}


def split_model(model: Any) -> Parts:
    """Return the definition, params and extras of a model of any kind.

    `ConfigError` where there is nothing to train, or no model; `StateError` after a step took it.
    """
    definition, params, extras = _split(model)
    if not jax.tree.leaves(params):
        leaves = jax.tree.leaves(extras if extras else model)
        kinds = sorted({type(leaf).__name__ for leaf in leaves})
        raise ConfigError(
            f"the model has {len(leaves)} leaves ({', '.join(kinds) or 'none'}) and 0 trainable "
            "arrays; a trainable array has a floating-point dtype: make it one with jnp.asarray"
        )
    check_unused((params, extras))
    return definition, params, extras


def _split(model: Any) -> Parts:
    # A model of a library that was never imported cannot be here, so none is imported for it.
    if "flax" in sys.modules:
        import flax.linen
        import flax.nnx

        if isinstance(model, flax.nnx.Module):
            from replicax.core.models.nnx import split_nnx

            return split_nnx(model)
        if isinstance(model, flax.linen.Module):
            from replicax.core.models.linen import split_linen

            return split_linen(model)
    _refuse_foreign(model.model if isinstance(model, Stateful) else model)
    if "equinox" in sys.modules:
        from replicax.core.models.equinox import holds_equinox, split_equinox

        if holds_equinox(model):
            return split_equinox(model)
    return split_pytree(model)


def _refuse_foreign(model: PyTree) -> None:
    """Raise `ConfigError` if a pytree is or holds what would train and is no parameter."""

    def look(path: Any, node: Any) -> bool:
        reason = _reason(node)
        if reason:
            where = f"model{jax.tree_util.keystr(path)}" if path else "the model"
            raise ConfigError(f"{where} {reason}")
        return False

    jax.tree_util.tree_leaves_with_path(model, is_leaf=look, is_leaf_takes_path=True)


def _reason(node: Any) -> str | None:
    for (module, name), instead in _INSTEAD.items():
        if _is(node, module, name):
            return f"is an instance of {module}.{name}; {instead}"
    kind = type(node).__name__
    if type(node).__module__.startswith("optax.") and kind.endswith("State"):
        return f"is an optax {kind}, which does not train; pass the model alone"
    if _is(node, "flax.nnx", "Variable") and not _is(node, "flax.nnx", "Param"):
        return f"is an nnx.{kind}, which does not train; pass the NNX model, not its state"
    if _is(node, "flax.linen", "Module") and node.scope is not None:
        return f"is a bound {kind}; pass one bound Linen module that has all others as submodules"
    if isinstance(node, Mapping) and set(node) == {"average", "counter", "hidden"}:
        return "is state of a Haiku module, which does not train; pass the params alone"
    if isinstance(node, Mapping) and "params" in node:
        others = [name for name in node if name != "params" and _trains(node[name])]
        if others:
            return (
                f"has params and {', '.join(map(str, others))}, as variables of a Linen module, of "
                "which only params train; pass module.bind(variables)"
            )
    return None


def _is(node: Any, module: str, name: str) -> bool:
    return isinstance(node, getattr(sys.modules.get(module), name, ()))


def _trains(tree: Any) -> bool:
    return isinstance(tree, Mapping) and any(map(is_trainable, jax.tree.leaves(tree)))
