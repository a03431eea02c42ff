"""The leaves of a model of any kind by dotted paths, and the model with other leaves."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from replicax.core.ground.leaves import PyTree, from_host, is_random_key
from replicax.core.models.definition import Definition, is_trainable
from replicax.core.models.split import split_model
from replicax.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class ModelLeaves:
    """A split model and its arrays by path; random keys are not among them."""

    definition: Definition
    trees: tuple[PyTree, PyTree]
    by_path: dict[str, Any]

    @property
    def weights(self) -> list[str]:
        """Paths of what a file of the model has: parameters and floating-point statistics."""
        return [path for path, leaf in self.by_path.items() if is_trainable(leaf)]

    def model(self, changed: Mapping[str, Any]) -> Any:
        """Return the model with other arrays at some paths."""

        def leaf(path: Any, old: Any) -> Any:
            return changed.get(_dotted(path), old)

        return self.definition.merge(*(jax.tree.map_with_path(leaf, tree) for tree in self.trees))


def leaves_of(model: Any) -> ModelLeaves:
    """Return the leaves of a model, whose arrays may be abstract.

    Raises:
        ConfigError: two of them have one path, or it is no model.
    """
    definition, *trees = split_model(model)
    by_name: dict[str, Any] = {}
    for tree in trees:
        for path, leaf in jax.tree.leaves_with_path(tree):
            name = _dotted(path)
            if name in by_name:
                raise ConfigError(
                    f"two arrays of this model have the dotted path {name}; names in a file must "
                    "be unique: rename one in the model"
                )
            by_name[name] = leaf
    arrays = {path: leaf for path, leaf in by_name.items() if not is_random_key(leaf)}
    return ModelLeaves(definition, (trees[0], trees[1]), arrays)


def like_leaf(array: np.ndarray, leaf: Any) -> Any:
    """Return a new value of `leaf` where it is: on the host, or on the same devices."""
    if isinstance(leaf, np.ndarray | np.generic):
        return array
    placed = leaf.sharding if not isinstance(leaf, jax.Array) or leaf.committed else None
    return jnp.asarray(array) if placed is None else from_host(array, placed)


def _dotted(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".")
