"""Functions for use in a loss: rows of other replicas, padding, and numbers of rows and steps.

Outside a step, each function behaves as on one device, so a loss can be tested by itself.
"""

import contextlib
import dataclasses
from collections.abc import Iterator
from contextvars import ContextVar
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from replicax.core.data.batch import Batch
from replicax.core.data.rows import opened
from replicax.core.ground.leaves import PyTree, by_dtype, in_one_call
from replicax.core.models.definition import CallContext
from replicax.core.placement.mesh import numbers_on
from replicax.errors import LossError
from replicax.text.arguments import answered


@dataclasses.dataclass(eq=False)
class LossContext:
    """The rows seen by a loss or a custom step."""

    mask: jax.Array
    """float32 `[rows]`, 0 for padding."""
    context: CallContext
    trace: Any
    """The JAX trace in which it is called."""
    primitives: tuple[Any, Batch] | None = None
    """How a custom step sums, and its batch; None in a loss. See `custom_step`."""
    weighs: bool = False
    """Whether `row_weights` was called."""


_current: ContextVar[LossContext | None] = ContextVar("replicax_inside", default=None)
# Part of the key of JAX's caches: a `jax.jit` in a loss is retraced if `gather` differs.
_gathers = jax.make_user_context()


@contextlib.contextmanager
def inside(
    mask: jax.Array, context: CallContext, primitives: tuple[Any, Batch] | None = None
) -> Iterator[LossContext]:
    """Enter a context in which the functions below refer to these rows."""
    from jax.extend.core import get_opaque_trace_state  # not before: it imports Pallas

    here = LossContext(mask, context, get_opaque_trace_state(), primitives)
    token = _current.set(here)
    # The sums of a step belong to its trace, so no cache may pass them to another trace.
    once = None if primitives is None else object()
    try:
        with _gathers((context.axis, context.part, once)):
            yield here
    finally:
        _current.reset(token)


def current() -> LossContext | None:
    """Return the rows of the current context, if any."""
    return _current.get()


@answered
def gather(rows: PyTree) -> PyTree:
    """Return the rows of the global batch, in order, for a loss whose rows depend on each other.

    It is differentiable, and costs one all-gather per dtype and one reduce-scatter in the backward
    pass. If the loss already sees the global batch (one device, mode `jit`, outside a step), `rows`
    is returned unchanged. It includes padding: gather `row_weights` too, to exclude it.

    Examples:
        >>> def contrastive(model, batch, key):
        ...     image, text = model(batch["image"]), model(batch["text"])
        ...     texts, weights = rx.gather((text, rx.row_weights(text)))
        ...     of_all = jax.nn.logsumexp(image @ texts.T, axis=1, b=weights)
        ...     return of_all - jnp.sum(image * text, axis=1)

    Args:
        rows: a pytree of arrays `[rows, ...]`, one entry per row that the loss sees.

    Raises:
        LossError: the loss sees a micro-batch, not all rows of its replica.
    """
    here = _seeing("gather", rows)
    if here is None:
        return rows
    if here.context.part and here.context.gather is None:
        raise LossError(
            "rx.gather in a loss computed on micro-batches, which would only see rows of the same "
            "micro-batch: use accumulate=1 or mode='exact', and no stages"
        )
    if here.context.axis is None and here.context.gather is None:
        return rows_gathered_already(rows)
    of_axis = partial(lax.all_gather, axis_name=here.context.axis, tiled=True)
    return by_dtype(here.context.gather or in_one_call(of_axis), rows)


@answered
def independent(rows: PyTree) -> PyTree:
    """Declare that each row of `rows` is computed from the same row of the batch alone.

    For a computation that Replicax cannot follow, such as a kernel of one's own; `rows` is returned
    unchanged. `replicax verify` tests the declaration.

    Examples:
        >>> def loss(model, batch, key):
        ...     rows = batch["x"][::-1] @ model["w"]  # in another order, and back
        ...     return rx.independent(rows[::-1] - batch["y"]) ** 2
        >>> dp = rx.DataParallel(loss, optimizer, mode="shard_map")
        >>> state, metrics = dp.step(dp.init(model), batch)

    Args:
        rows: a pytree of arrays `[rows, ...]`, one entry per row that the loss or the step sees.
    """
    if _seeing("independent", rows) is None:
        return rows
    return jax.tree.map(lambda leaf: rows_declared_independent(leaf)[0], rows)


@answered
def row_weights(rows: PyTree) -> jax.Array:
    """Return the padding mask of the rows that a loss sees: 1 for real rows, 0 for padding.

    Examples:
        >>> print(rx.row_weights(jnp.zeros((3, 2))))
        [1. 1. 1.]

    Args:
        rows: a pytree of arrays `[rows, ...]`, one entry per row that the loss sees.

    Returns:
        float32 `[rows]`; all 1 outside a step.
    """
    here = _seeing("row_weights", rows)
    if here is None:
        return jnp.ones(opened(rows).count, jnp.float32)
    _check_trace("row_weights", here)
    here.weighs = True
    return here.mask


@answered
def row_numbers(rows: PyTree) -> jax.Array:
    """Return the number of each row in the global batch: its place in what `gather` returns.

    For a row's own column in a matrix of all pairs, or its random key. Padding comes last.

    Examples:
        >>> def contrastive(model, batch, key):
        ...     logits = model(batch["image"]) @ rx.gather(model(batch["text"])).T
        ...     own = rx.row_numbers(logits)
        ...     return optax.softmax_cross_entropy_with_integer_labels(logits, own)
        >>> print(rx.row_numbers(jnp.zeros((3, 2))))
        [0 1 2]

    Args:
        rows: a pytree of arrays `[rows, ...]`, one entry per row that the loss sees.

    Returns:
        int32 `[rows]`, from 0; `jnp.arange(rows)` outside a step. A micro-batch has every K-th.

    Raises:
        LossError: the loss sees some of the rows of a stage, or of a part that jobs exchange.
    """
    if (here := _seeing("row_numbers", rows)) is None:
        return numbers_on(None, opened(rows).count)
    _check_trace("row_numbers", here)
    numbers = here.context.row_numbers or partial(numbers_on, here.context.axis)
    if here.context.part and here.context.row_numbers is None:
        raise LossError(
            "rx.row_numbers of rows of stages or of jobs' parts: pass row numbers in the batch"
        )
    return numbers(here.mask.shape[0])


@answered
def step_number() -> jax.Array:
    """Return the number of steps before this one, int32; 0 outside a step.

    In evaluation it is the number of steps already applied to the state.

    Examples:
        >>> def loss(model, batch, key):
        ...     warm_up = jnp.minimum(1.0, rx.step_number() / 1000)
        ...     return warm_up * (batch["x"] @ model["w"] - batch["y"]) ** 2
        >>> dp = rx.DataParallel(loss, optimizer)
        >>> state, metrics = dp.step(dp.init(model), batch)
    """
    here = _current.get()
    if here is None or here.context.step is None:
        return jnp.zeros((), jnp.int32)
    _check_trace("step_number", here)
    return here.context.step


def weighs() -> bool:
    """Whether `row_weights` was called since `inside` was entered."""
    here = _current.get()
    return here is not None and here.weighs


def _seeing(name: str, rows: PyTree) -> LossContext | None:
    here = _current.get()
    if here is not None and (count := opened(rows).count) != (seen := here.mask.shape[0]):
        raise LossError(
            f"rx.{name} got {count} rows, but the loss sees {seen}: pass arrays with one entry per "
            "row of the batch"
        )
    return here


def _check_trace(name: str, here: LossContext) -> None:
    """Raise `LossError` if a JAX cache might keep the returned value beyond the step."""
    from jax.extend.core import get_opaque_trace_state

    if get_opaque_trace_state() != here.trace:
        raise LossError(
            f"rx.{name} was called inside a function that the loss passes to jax.jit, jax.grad, "
            "scan or similar: call it before, and pass in the result"
        )


@jax.jit
def rows_gathered_already(rows: PyTree) -> PyTree:
    """Return the global batch's rows unchanged; `jaxprs.row_dependence` finds this by name."""
    return rows


@jax.jit
def rows_declared_independent(rows: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return `rows` and their sum; `jaxprs.row_dependence` finds this, and their dim, by name."""
    return rows, jnp.sum(rows, axis=0)
