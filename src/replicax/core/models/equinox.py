"""Equinox modules, alone or in a pytree: in evaluation they are in inference mode."""

from collections.abc import Callable
from typing import Any

import jax
from equinox import Module
from equinox.nn import State, StateIndex, inference_mode

from replicax.core.models.definition import Parts, PyTree, View
from replicax.core.models.pytree import PytreeDefinition, split_pytree
from replicax.errors import ConfigError


def holds_equinox(model: PyTree) -> bool:
    """Whether a pytree is or holds an Equinox module or `State`."""
    return _holds(model, (Module, State))


def split_equinox(model: PyTree) -> Parts:
    """`split_model` for a pytree with Equinox modules, of which none may hold a `State`."""
    if _holds(model, (State, StateIndex)):
        raise ConfigError(
            "the model holds an Equinox State (BatchNorm, say), which a loss cannot hand back; use "
            "equinox.nn.GroupNorm or LayerNorm, or a Flax NNX or Linen model"
        )
    return split_pytree(model, EquinoxDefinition)


class EquinoxDefinition(PytreeDefinition):
    """A pytree with Equinox modules."""

    def apply(
        self, function: Callable[[Any], Any], params: PyTree, extras: PyTree, view: View
    ) -> tuple[Any, PyTree]:
        model = self.merge(params, extras)
        return function(inference_mode(model) if view.key is None else model), extras


def _holds(model: PyTree, kinds: tuple[type, ...]) -> bool:
    nodes = jax.tree.leaves(model, is_leaf=lambda node: isinstance(node, kinds))
    return any(isinstance(node, kinds) for node in nodes)
