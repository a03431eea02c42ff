"""A model of any kind in parts: a definition, its trainable arrays, its other arrays."""

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from replicax.core.mesh import Axis
from replicax.errors import ConfigError

PyTree = Any
Parts = tuple["Definition", PyTree, PyTree]
"""`(definition, params, extras)`: a model taken apart."""


@dataclasses.dataclass(frozen=True)
class View:
    """How a model is called: with which random numbers, and beside which other rows."""

    key: jax.Array | None = None
    """Source of random numbers in training; None in evaluation."""
    axis: Axis | None = None
    """The replica axis to average batch statistics over, if each replica sees its own rows."""
    alone: bool = False
    """Whether the rows are part of a batch, and no statistics are averaged with other parts'."""
    part: bool = False
    """Whether the rows are some of a replica's, one of its micro-batches."""
    step: jax.Array | None = None
    """int32 scalar: steps done before."""
    scale: jax.Array | None = None
    """float32 scalar that the loss is multiplied by before it is differentiated; None for 1."""
    gather: Callable[[jax.Array], jax.Array] | None = None
    """Gathers the rows of all parts of a batch where no axis does."""


class Definition(Protocol):
    """A model without its arrays: what puts it together again, and calls a function on it."""

    def merge(self, params: PyTree, extras: PyTree) -> Any:
        """Return the user's model, whole."""

    def apply(
        self, function: Callable[[Any], Any], params: PyTree, extras: PyTree, view: View
    ) -> tuple[Any, PyTree]:
        """Return `function(model)` and the extras after it.

        Raises `ConfigError` where the rows are not the whole batch and it changed an array that is
        no batch statistic.
        """


def is_array(leaf: Any) -> bool:
    """Whether `leaf` is an array, attached or abstract."""
    return isinstance(leaf, (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct))


def is_trainable(leaf: Any) -> bool:
    """Whether `leaf` is an array, attached or abstract, of floating-point or complex dtype."""
    return is_array(leaf) and jnp.issubdtype(leaf.dtype, jnp.inexact)


def changed_alone(path: str) -> ConfigError:
    """Return the error for an array that each replica would change by itself."""
    return ConfigError(
        f"the model writes {path} from its own replica's rows, and replicas must stay equal; only "
        "BatchNorm's statistics are synchronised: use mode='jit', where the batch is one"
    )
