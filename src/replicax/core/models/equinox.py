"""Equinox modules, alone or in a pytree; inference mode is set in evaluation."""

from typing import Any

import jax
from equinox import Module
from equinox.nn import State, StateIndex

from replicax.core.ground.leaves import PyTree
from replicax.core.models.definition import SplitModel
from replicax.core.models.pytree import PytreeDefinition, split_pytree
from replicax.core.models.stateful import Stateful
from replicax.core.models.training_mode import for_inference
from replicax.errors import ConfigError


def holds_equinox(model: PyTree) -> bool:
    """Whether a pytree is or contains an Equinox module or `State`."""
    return _holds(model, (Module, State))


def split_equinox(model: PyTree) -> SplitModel:
    """Split a pytree with Equinox modules; a `State` must be in a `Stateful`."""
    if _holds(model, (State, StateIndex)) and not isinstance(model, Stateful):
        raise ConfigError(
            "the model has an Equinox State (as for BatchNorm), which the loss must return: call "
            "init(rx.Stateful(model, state)), and return rx.NewState(values, state)"
        )
    return split_pytree(model, EquinoxDefinition)


class EquinoxDefinition(PytreeDefinition):
    """A pytree with Equinox modules."""

    def in_inference(self, model: Any) -> Any:
        return for_inference(model)


def _holds(model: PyTree, kinds: tuple[type, ...]) -> bool:
    nodes = jax.tree.leaves(model, is_leaf=lambda node: isinstance(node, kinds))
    return any(isinstance(node, kinds) for node in nodes)
