"""Split models: a definition, the trainable arrays, and the other arrays."""

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from replicax.core.ground.leaves import PyTree
from replicax.core.placement.mesh import Axis
from replicax.errors import ConfigError

SplitModel = tuple["Definition", PyTree, PyTree]
"""`(definition, params, extras)`: a split model."""


@dataclasses.dataclass(frozen=True)
class CallContext:
    """The context of a model call: its random key and the other rows of the batch."""

    key: jax.Array | None = None
    """Source of random numbers in training; None in evaluation."""
    axis: Axis | None = None
    """The replica axis to average batch statistics over, if each replica sees its own rows."""
    alone: bool = False
    """Whether the rows are part of a batch, with no statistics averaged over the other parts."""
    only_read: bool = False
    """Whether the model's arrays after the call are not used, so that any may change."""
    whole: bool = False
    """Whether the rows are the global batch, so that the axis of the rows, if named, has size 1."""
    part: bool = False
    """Whether the rows are one of several micro-batches of a replica."""
    step: jax.Array | None = None
    """int32 scalar: number of previous steps."""
    scale: jax.Array | None = None
    """float32 scalar by which the loss is multiplied before differentiation; None for 1."""
    gather: Callable[[list[jax.Array]], list[jax.Array]] | None = None
    """Gathers the rows of all parts of a batch, in arrays of one dtype, if no axis does."""
    row_numbers: Callable[[int], jax.Array] | None = None
    """Returns the numbers, in the whole batch, of a part's so many rows, if no axis does."""

    @property
    def may_write(self) -> bool:
        """Whether arrays other than batch statistics may change: the rows are the whole batch."""
        return self.only_read or not (self.alone or self.axis is not None)


class Definition(Protocol):
    """A model without its arrays: merges them back, and calls functions on the model."""

    def merge(self, params: PyTree, extras: PyTree) -> Any:
        """Return the user's complete model, in training mode."""

    def in_inference(self, model: Any) -> Any:
        """Return a merged model in inference mode, if it has one; it may be changed.

        The state of a custom step is the user's own, and stays as it is.
        """

    def apply(
        self, function: Callable[[Any], Any], params: PyTree, extras: PyTree, context: CallContext
    ) -> tuple[Any, PyTree]:
        """Return `function(model)` and the updated extras.

        Raises `ConfigError` if the rows are not the whole batch and it changed an array that is not
        a batch statistic.
        """

    def as_model(self, params: PyTree) -> Any:
        """Return `params`, such as a gradient, in the structure that an optimizer has them in."""

    def written(self, model: Any, extras: PyTree) -> tuple[Any, ...]:
        """Return what a custom step gets of the `extras` after a call: nothing, or the new state.

        A `model` that can be changed gets them itself.
        """


def is_array(leaf: Any) -> bool:
    """Whether `leaf` is an array, attached or abstract."""
    return isinstance(leaf, (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct))


def is_trainable(leaf: Any) -> bool:
    """Whether `leaf` is an array, attached or abstract, of floating-point or complex dtype."""
    return is_array(leaf) and jnp.issubdtype(leaf.dtype, jnp.inexact)


def changed_alone(path: str) -> ConfigError:
    """Return the error for an array that each replica would update independently."""
    return ConfigError(
        f"the model updates {path} from one replica's rows, but replicas must stay equal; only "
        "BatchNorm statistics are synchronised: use mode='jit', which sees the global batch"
    )
