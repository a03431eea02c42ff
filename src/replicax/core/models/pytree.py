"""Plain pytrees: arrays of a floating dtype train, all else is constant."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from replicax.core.leaves import is_random_key
from replicax.core.models.definition import Parts, PyTree, View, is_array, is_trainable
from replicax.errors import StateError


class PytreeDefinition:
    """The structure of a pytree, and its leaves that are no arrays."""

    def __init__(self, model: PyTree) -> None:
        leaves, self._structure = jax.tree.flatten(model)
        self._kinds = [self.kind(leaf) for leaf in leaves]
        self._static = [None if is_array(leaf) else leaf for leaf in leaves]

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash(self._structure)

    @staticmethod
    def kind(leaf: Any) -> str:
        """Return which of the two trees has `leaf`, or `static`."""
        if is_trainable(leaf):
            return "params"
        return "extras" if is_array(leaf) else "static"

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
        jax.tree.map(lambda leaf, wanted=wanted: leaf if kind.kind(leaf) == wanted else None, model)
        for wanted in ("params", "extras")
    )
    return kind(model), params, extras if jax.tree.leaves(extras) else {}


class OwnState(PytreeDefinition):
    """The state of a step of one's own: all its arrays are `params`."""

    @staticmethod
    def kind(leaf: Any) -> str:
        return "params" if is_array(leaf) else "static"

    def arrays(self, after: PyTree, before: PyTree) -> PyTree:
        """Return the arrays of the state that a step returned, in the dtypes of those before.

        Raises:
            StateError: it is not shaped as the one before.
        """
        definition, params, _ = split_pytree(after, OwnState)
        found, wanted = _described(definition.merge(params, {})), _described(self.merge(before, {}))
        for path in {**wanted, **found}:
            was, now = wanted.get(path, "not there"), found.get(path, "not there")
            if was != now:
                raise StateError(
                    f"state{path} is {was} before the step and {now} after it; both are alike, and "
                    "what changes is an array: return it as it was, begun by jnp.asarray"
                )
        if definition != self:
            raise StateError(
                "the state has other containers after the step than before; both are alike: "
                "return the structure that it was given"
            )
        return jax.tree.map(
            lambda leaf: leaf if is_random_key(leaf) else jnp.asarray(leaf, leaf.dtype), params
        )


def _described(state: PyTree) -> dict[str, str]:
    return {
        jax.tree_util.keystr(path): f"{leaf.dtype}{list(leaf.shape)}"
        if is_array(leaf)
        else repr(leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(state)
    }
