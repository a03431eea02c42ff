"""Plain pytrees: floating-point arrays are trainable, all other leaves are constant."""

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from replicax.core.ground.leaves import PyTree, is_random_key, kind, kind_changes, takes
from replicax.core.models.definition import CallContext, SplitModel, is_array, is_trainable
from replicax.core.models.stateful import Stateful, take_state, values_of
from replicax.errors import StateError


class PytreeDefinition:
    """The structure of a pytree, and its non-array leaves."""

    def __init__(self, model: PyTree) -> None:
        leaves, self._structure = jax.tree.flatten(model)
        self._trees = _trees(model, type(self))
        self.writes = isinstance(model, Stateful)
        self._static = [None if is_array(leaf) else leaf for leaf in leaves]

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash(self._structure)

    @staticmethod
    def tree_of(leaf: Any, written: bool) -> str:
        """Return the name of the tree for `leaf`; `written`: it is in the state of a `Stateful`."""
        if is_trainable(leaf) and not written:
            return "params"
        return "extras" if is_array(leaf) else "static"

    def merge(self, params: PyTree, extras: PyTree) -> Any:
        leaves = {"params": iter(jax.tree.leaves(params)), "extras": iter(jax.tree.leaves(extras))}
        leaves["static"] = (leaf for leaf in self._static if leaf is not None)
        return jax.tree.unflatten(self._structure, [next(leaves[tree]) for tree in self._trees])

    def as_model(self, params: PyTree) -> PyTree:
        """Return `params` as the model they are of, with no other leaves."""
        leaves = iter(jax.tree.leaves(params))
        own = [next(leaves) if tree == "params" else None for tree in self._trees]
        model = jax.tree.unflatten(self._structure, own)
        return model.model if self.writes else model

    def written(self, model: PyTree, extras: PyTree) -> tuple[Any, ...]:
        """Return the state of a `Stateful`."""
        if not self.writes:
            return ()
        arrays = iter(jax.tree.leaves(extras.state))
        return (jax.tree.map(lambda leaf: next(arrays) if is_array(leaf) else leaf, model.state),)

    def apply(
        self, function: Callable[[Any], Any], params: PyTree, extras: PyTree, context: CallContext
    ) -> tuple[Any, PyTree]:
        returned = function(self.seen(self.merge(params, extras), context))
        if self.writes:
            extras = take_state(returned, extras, context)
        return values_of(returned) if self.writes else returned, extras

    def seen(self, model: Any, context: CallContext) -> Any:
        """Return the model as passed to a loss."""
        return self.in_inference(model) if context.key is None else model

    def in_inference(self, model: Any) -> Any:
        return model


def split_pytree(model: PyTree, into: type[PytreeDefinition] = PytreeDefinition) -> SplitModel:
    """Split a plain pytree, with a definition of class `into`."""
    if isinstance(model, Stateful):
        held: PyTree = Stateful(_held(model.model), model.state)
    else:
        held = _held(model)
    leaves, structure = jax.tree.flatten(held)
    of_leaves = list(zip(leaves, _trees(model, into), strict=True))
    params, extras = (
        jax.tree.unflatten(structure, [leaf if own == wanted else None for leaf, own in of_leaves])
        for wanted in ("params", "extras")
    )
    writes = isinstance(model, Stateful)
    return into(model), params, extras if writes or jax.tree.leaves(extras) else {}


def _held(model: PyTree) -> PyTree:
    """Return `model`, or its leaves by path if a class in it cannot hold anything but arrays.

    The parts of a model have None for other leaves, and there are trees of shardings like it.
    """
    if takes(model, None, object()):
        return model
    paths = jax.tree_util.tree_leaves_with_path(model)
    return OrderedDict((jax.tree_util.keystr(path), leaf) for path, leaf in paths)


def _trees(model: PyTree, into: type[PytreeDefinition]) -> list[str]:
    model, state = (model.model, model.state) if isinstance(model, Stateful) else (model, ())
    trained = [into.tree_of(leaf, False) for leaf in jax.tree.leaves(model)]
    return trained + [into.tree_of(leaf, True) for leaf in jax.tree.leaves(state)]


class CustomState(PytreeDefinition):
    """The state of a custom step: all its arrays are `params`."""

    @staticmethod
    def tree_of(leaf: Any, _written: bool) -> str:
        return "params" if is_array(leaf) else "static"

    def seen(self, model: Any, context: CallContext) -> Any:
        from replicax.core.models.training_mode import for_inference

        return for_inference(model) if context.key is None else model

    def arrays(self, after: PyTree, before: PyTree) -> PyTree:
        """Return the arrays of the state returned by a step, in their previous dtypes."""
        definition, params, _ = split_pytree(after, CustomState)
        states = self.merge(before, {}), definition.merge(params, {})
        for path, was, now in kind_changes(*states, lambda x: kind(x) if is_array(x) else repr(x)):
            raise StateError(
                f"state{path} is {was} before the step and {now} after it; both must match, and "
                "changing values must be arrays: keep its kind, or create it with jnp.asarray"
            )
        if definition != self:
            raise StateError(
                "the state has different containers after the step than before; both must match: "
                "return the same structure"
            )
        arrays = [
            leaf if is_random_key(leaf) else jnp.asarray(leaf, leaf.dtype)
            for leaf in jax.tree.leaves(params)
        ]
        return jax.tree.unflatten(jax.tree.structure(before), arrays)
