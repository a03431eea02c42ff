"""Functions for use in a loss: the rows of other replicas, which rows are real, the step number.

Outside of a step each function answers as on one device, so that the same loss is tested alone.
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
from jax.extend.core import get_opaque_trace_state
from jax.flatten_util import ravel_pytree

from replicax.core.batch import row_count
from replicax.core.leaves import by_dtype
from replicax.core.models.definition import PyTree, View
from replicax.errors import LossError


@dataclasses.dataclass(eq=False)
class Inside:
    """The rows that a loss, or a step of one's own, sees."""

    mask: jax.Array
    """float32 `[rows]`, 0 on padding."""
    view: View
    trace: Any
    """The JAX trace that calls it."""
    own: Any = None
    """The means of a step of one's own to sum; None in a loss. See `replicax.core.own`."""
    gathers: bool = False
    """Whether `gather` was called."""
    weighs: bool = False
    """Whether `row_weights` was called."""


_current: ContextVar[Inside | None] = ContextVar("replicax_inside", default=None)
# Part of the key of JAX's caches: a `jax.jit` within a loss is traced anew where `gather` differs.
_gathers = jax.make_user_context()


@contextlib.contextmanager
def inside(mask: jax.Array, view: View, own: Any = None) -> Iterator[Inside]:
    """Within this context the functions below speak of these rows."""
    here = Inside(mask, view, get_opaque_trace_state(), own)
    token = _current.set(here)
    # What a step sums is part of what is traced, so that no cache may give it to another trace.
    once = None if own is None else object()
    try:
        with _gathers((view.axis, view.part, once)):
            yield here
    finally:
        _current.reset(token)


def current() -> Inside | None:
    """Return the rows that are spoken of here, if any."""
    return _current.get()


def gather(rows: PyTree) -> PyTree:
    """Return the rows of the whole batch, in order: for a loss whose rows depend on one another.

    It is differentiable, and costs one all-gather for each dtype, and one reduce-scatter back. What
    sees the whole batch already (one device, mode `jit`, a loss outside of a step) gets back what
    it gave. Padding is among the rows: gather `row_weights` too, to leave it out.

    Examples:
        >>> def contrastive(model, batch, key):
        ...     image, text = model(batch["image"]), model(batch["text"])
        ...     texts, weights = rx.gather((text, rx.row_weights(text)))
        ...     of_all = jax.nn.logsumexp(image @ texts.T, axis=1, b=weights)
        ...     return of_all - jnp.sum(image * text, axis=1)

    Args:
        rows: a pytree of arrays `[rows, ...]`, of the rows that the loss sees.

    Raises:
        LossError: the loss sees a micro-batch, not all rows of its replica.
    """
    here = _seeing("gather", rows)
    if here is None:
        return rows
    here.gathers = True
    if here.view.part and here.view.gather is None:
        raise LossError(
            "rx.gather in a loss computed on micro-batches, each of which would see its own rows "
            "alone: use accumulate=1 or mode='exact', and no stages"
        )
    if here.view.axis is None and here.view.gather is None:
        return rows_gathered_already(rows)
    gather_rows = here.view.gather or partial(lax.all_gather, axis_name=here.view.axis, tiled=True)

    def gathered(leaves: list[jax.Array]) -> list[jax.Array]:
        _, unpack = ravel_pytree([leaf[0] for leaf in leaves])
        packed = jax.vmap(lambda row: ravel_pytree(row)[0])(leaves)
        whole = gather_rows(packed)
        return list(jax.vmap(unpack)(whole))

    return by_dtype(gathered, rows)


def row_weights(rows: PyTree) -> jax.Array:
    """Return which of the rows that a loss sees count: 1, and 0 for padding.

    Examples:
        >>> print(rx.row_weights(jnp.zeros((3, 2))))
        [1. 1. 1.]

    Args:
        rows: a pytree of arrays `[rows, ...]`, of the rows that the loss sees.

    Returns:
        float32 `[rows]`; all 1 outside of a step.
    """
    here = _seeing("row_weights", rows)
    if here is None:
        return jnp.ones(row_count(rows), jnp.float32)
    _check_trace("row_weights", here)
    here.weighs = True
    return here.mask


def step_number() -> jax.Array:
    """Return how many steps were done before this one, int32; 0 outside of a step.

    In evaluation it is the number of steps that the state has seen.

    Examples:
        >>> def loss(model, batch, key):
        ...     warm_up = jnp.minimum(1.0, rx.step_number() / 1000)
        ...     return warm_up * (batch["x"] @ model["w"] - batch["y"]) ** 2
        >>> dp = rx.DataParallel(loss, optimizer)
        >>> state, metrics = dp.step(dp.init(model), batch)
    """
    here = _current.get()
    if here is None or here.view.step is None:
        return jnp.zeros((), jnp.int32)
    _check_trace("step_number", here)
    return here.view.step


def weighs() -> bool:
    """Whether `row_weights` was called since `inside` was entered."""
    here = _current.get()
    return here is not None and here.weighs


def _seeing(name: str, rows: PyTree) -> Inside | None:
    here = _current.get()
    if here is not None:
        count, seen = row_count(rows), here.mask.shape[0]
        if count != seen:
            raise LossError(
                f"rx.{name} was given {count} rows, and the loss sees {seen}: give it arrays with "
                "one entry for each row of the batch"
            )
    return here


def _check_trace(name: str, here: Inside) -> None:
    """Raise `LossError` where JAX might keep what is returned beyond the step, in a cache."""
    if get_opaque_trace_state() != here.trace:
        raise LossError(
            f"rx.{name} was called inside of a function that the loss hands to jax.jit, jax.grad, "
            "scan or the like: call it before, and pass on what it returns"
        )


@jax.jit
def rows_gathered_already(rows: PyTree) -> PyTree:
    """Return the whole batch's rows as they are; `replicax.core.rows` finds this by its name."""
    return rows
