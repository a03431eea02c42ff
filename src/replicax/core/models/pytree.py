"""Plain pytrees: arrays of a floating dtype train, all else is constant."""

from collections.abc import Callable
from typing import Any

import jax

from replicax.core.models.definition import Parts, PyTree, View, is_array, is_trainable


class PytreeDefinition:
    """The structure of a pytree, and its leaves that are no arrays."""

    def __init__(self, model: PyTree) -> None:
        leaves, self._structure = jax.tree.flatten(model)
        self._kinds = [_kind(leaf) for leaf in leaves]
        self._static = [None if is_array(leaf) else leaf for leaf in leaves]

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash(self._structure)

    def merge(self, params: PyTree, extras: PyTree) -> Any:
        leaves = {"params": iter(jax.tree.leaves(params)), "extras": iter(jax.tree.leaves(extras))}
        leaves["static"] = (leaf for leaf in self._static if leaf is not None)
        return jax.tree.unflatten(self._structure, [next(leaves[kind]) for kind in self._kinds])

    def apply(
        self, function: Callable[[Any], Any], params: PyTree, extras: PyTree, view: View
    ) -> tuple[Any, PyTree]:
        return function(self.merge(params, extras)), extras


def split_pytree(model: PyTree, kind: type[PytreeDefinition] = PytreeDefinition) -> Parts:
    """`split_model` for a plain pytree, with a definition of class `kind`."""
    params, extras = (
        jax.tree.map(lambda leaf, wanted=wanted: leaf if _kind(leaf) == wanted else None, model)
        for wanted in ("params", "extras")
    )
    return kind(model), params, extras if jax.tree.leaves(extras) else {}


def _kind(leaf: Any) -> str:
    if is_trainable(leaf):
        return "params"
    return "extras" if is_array(leaf) else "static"
