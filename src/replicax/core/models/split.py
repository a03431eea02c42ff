"""Any model <-> (params, extras): its trainable arrays, and its other arrays.

A definition is what is left of a model without its arrays. It puts the model together again, calls
a function on it, and takes out what the call has changed.
"""

import sys
from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from replicax.errors import ConfigError

PyTree = Any


class Definition(Protocol):
    """A model without its arrays."""

    def merge(self, params: PyTree, extras: PyTree) -> Any:
        """The user's model, whole."""

    def apply(
        self,
        function: Callable[[Any], Any],
        params: PyTree,
        extras: PyTree,
        *,
        key: jax.Array | None,
        axis: str | None,
        alone: bool,
    ) -> tuple[Any, PyTree]:
        """Call `function(model)`.

        Args:
            function: takes the whole model.
            params: trainable arrays.
            extras: the other arrays.
            key: source of the model's own random numbers in training; None in evaluation.
            axis: the replica axis that batch statistics are to be averaged over, if one is bound.
            alone: whether the rows are a part of a batch and no statistics are averaged with those
                of other parts.

        Returns:
            What the function returned, and the extras after the call.

        Raises:
            ConfigError: the rows are not the whole batch, and the call changed an array that
                batch statistics are no part of.
        """


def split_model(model: Any) -> tuple[Definition, PyTree, PyTree]:
    """The definition, params and extras of a plain pytree, Equinox, NNX, or bound Linen model.

    Raises:
        ConfigError: nothing to train, or a kind of model that cannot be carried.
    """
    definition, params, extras = _split(model)
    if not jax.tree.leaves(params):
        leaves = jax.tree_util.tree_leaves_with_path(extras if extras else model)
        kinds = sorted({type(leaf).__name__ for _, leaf in leaves})
        raise ConfigError(
            f"the model has {len(leaves)} leaves ({', '.join(kinds) or 'none'}) and 0 trainable "
            "arrays; a trainable array has a floating-point dtype: make it one with jnp.asarray"
        )
    return definition, params, extras


def abstract_model(make: Callable[..., Any], *arguments: Any) -> Any:
    """What `make(*arguments)` gives, with shapes for arrays; really made where it cannot be traced.

    Args:
        make: returns a model of any kind.
        arguments: of it.
    """
    definitions: list[Definition] = []

    def parts() -> tuple[PyTree, PyTree]:
        definition, params, extras = split_model(make(*arguments))
        definitions.append(definition)
        return params, extras

    try:
        params, extras = jax.eval_shape(parts)
    except jax.errors.JAXTypeError:  # it looks at values
        return make(*arguments)
    return definitions[0].merge(params, extras)


def is_trainable(leaf: Any) -> bool:
    """Whether `leaf` is an array (attached or abstract) of floating-point or complex dtype."""
    return is_array(leaf) and jnp.issubdtype(leaf.dtype, jnp.inexact)


def is_array(leaf: Any) -> bool:
    """Whether `leaf` is an array, attached or abstract."""
    return isinstance(leaf, (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct))


def changed_alone(path: str) -> ConfigError:
    """The error for an array that each replica would change by itself."""
    return ConfigError(
        f"the model writes {path} from its own replica's rows, and replicas must stay equal; only "
        "BatchNorm's statistics are synchronised: use mode='jit', where the batch is one"
    )


def _split(model: Any) -> tuple[Definition, PyTree, PyTree]:
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
    if "equinox" in sys.modules:
        _refuse_equinox_state(model)
    return split_pytree(model)


class PytreeDefinition:
    """A plain pytree or an Equinox module: its structure and its leaves that are no arrays."""

    def __init__(self, treedef: Any, leaves: list[Any]) -> None:
        self._treedef = treedef
        self._static = [None if is_array(leaf) else leaf for leaf in leaves]
        self._trainable = [is_trainable(leaf) for leaf in leaves]
        self._constant = [is_array(leaf) and not is_trainable(leaf) for leaf in leaves]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PytreeDefinition) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash(self._treedef)

    def merge(self, params: PyTree, extras: PyTree) -> Any:
        trainable, constant = iter(jax.tree.leaves(params)), iter(jax.tree.leaves(extras))
        leaves = [
            next(trainable) if is_param else next(constant) if is_extra else static
            for is_param, is_extra, static in zip(
                self._trainable, self._constant, self._static, strict=True
            )
        ]
        return jax.tree.unflatten(self._treedef, leaves)

    def apply(
        self,
        function: Callable[[Any], Any],
        params: PyTree,
        extras: PyTree,
        *,
        key: jax.Array | None,
        axis: str | None,
        alone: bool,
    ) -> tuple[Any, PyTree]:
        model = self.merge(params, extras)
        if key is None and "equinox" in sys.modules:
            import equinox

            model = equinox.nn.inference_mode(model)
        return function(model), extras


def split_pytree(model: PyTree) -> tuple[PytreeDefinition, PyTree, PyTree]:
    """`split_model` for a plain pytree: arrays of a floating dtype train, all else is constant."""
    leaves, treedef = jax.tree.flatten(model)
    params = jax.tree.map(lambda leaf: leaf if is_trainable(leaf) else None, model)
    extras = jax.tree.map(
        lambda leaf: leaf if is_array(leaf) and not is_trainable(leaf) else None, model
    )
    if not jax.tree.leaves(extras):
        extras = {}
    return PytreeDefinition(treedef, leaves), params, extras


def _refuse_equinox_state(model: Any) -> None:
    import equinox

    def is_state(node: Any) -> bool:
        return isinstance(node, (equinox.nn.State, equinox.nn.StateIndex))

    if any(is_state(leaf) for leaf in jax.tree.leaves(model, is_leaf=is_state)):
        raise ConfigError(
            "the model holds an Equinox State (BatchNorm, say), which a loss cannot hand back; use "
            "equinox.nn.GroupNorm or LayerNorm, or a Flax NNX or Linen model"
        )
