"""Plain pytrees: arrays of a floating dtype train, all else is constant."""

from collections.abc import Callable
from typing import Any

import jax

from replicax.core.models.definition import Parts, PyTree, View, is_array, is_trainable


class PytreeDefinition:
    """The structure of a pytree, and its leaves that are no arrays."""

    def __init__(self, model: PyTree) -> None:
        leaves, self._treedef = jax.tree.flatten(model)
        self._static = [None if is_array(leaf) else leaf for leaf in leaves]
        self._trainable = [is_trainable(leaf) for leaf in leaves]
        self._constant = [is_array(leaf) and not is_trainable(leaf) for leaf in leaves]

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and vars(self) == vars(other)

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
        self, function: Callable[[Any], Any], params: PyTree, extras: PyTree, view: View
    ) -> tuple[Any, PyTree]:
        return function(self.merge(params, extras)), extras


def split_pytree(model: PyTree, kind: type[PytreeDefinition] = PytreeDefinition) -> Parts:
    """`split_model` for a plain pytree.

    Args:
        model: any pytree.
        kind: class of the definition.
    """
    params = jax.tree.map(lambda leaf: leaf if is_trainable(leaf) else None, model)
    extras = jax.tree.map(
        lambda leaf: leaf if is_array(leaf) and not is_trainable(leaf) else None, model
    )
    return kind(model), params, extras if jax.tree.leaves(extras) else {}
