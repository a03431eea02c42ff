"""The loss contract: the values a loss function may return, and the sums behind them."""

import dataclasses
import functools
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from replicax.core.data.merged import Merge, Merged, Merging, apart, named_values
from replicax.core.data.per_row import ByRow, checked_rows
from replicax.core.ground.leaves import PyTree
from replicax.core.ground.precision import to_sum
from replicax.core.models.metric_objects import as_metric
from replicax.core.placement.mesh import DATA
from replicax.errors import ConfigError, LossError, ReplicaxError
from replicax.text.arguments import answered

LOSS = "loss"
RESERVED = (LOSS, "rows")
_COUNT = 1024


@answered
@partial(jax.tree_util.register_dataclass, data_fields=["values", "weights"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class Weighted:
    """Weighted values; their mean is sum(values * weights) / sum(weights).

    Weights are constants: no gradient flows through them, and those that depend on parameters must
    be passed through `jax.lax.stop_gradient`.

    Examples:
        >>> def loss(model, batch, key):
        ...     losses = (batch["x"] @ model["w"] - batch["y"]) ** 2
        ...     return rx.Weighted(losses, batch["y"] > 0)  # the mean over rows with y > 0
        >>> dp = rx.DataParallel(loss, optimizer)
        >>> state, metrics = dp.step(dp.init(model), batch)
    """

    values: Any
    """Float array `[rows, ...]`."""
    weights: Any
    """Array shaped like the values or their leading dims, at least `[rows]`; 0 omits an entry."""


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["total", "weight", "seeded", "divisor"],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class WeightedSum:
    """Numerator and denominator of a mean, which can be added to others; all float32."""

    total: jax.Array
    weight: jax.Array
    seeded: jax.Array | None = None
    """The total over the number of values in the whole batch, whose gradient a step computes: that
    of the mean if all weights are 1. So a backward pass that is not linear, such as one that clips,
    sees what it does if `jnp.mean` is differentiated. None in evaluation."""
    divisor: jax.Array | None = None
    """The weight over that number: the divisor of the gradient. None in evaluation."""

    def mean(self) -> jax.Array:
        """Return the weighted mean; NaN if the total weight is 0."""
        return self.total / self.weight


def call(
    loss: Callable[..., Any], model: Any, data: Any, key: jax.Array | None, *, whole: bool = False
) -> Any:
    """Return `loss(model, data, key)`; `LossError` if the loss names a mesh axis itself.

    If it is given the `whole` batch, the axis of the rows has size 1 there: a library's module that
    averages its statistics over it already has those of all rows.
    """
    try:
        try:
            return loss(model, data, key)
        except NameError as error:
            if not (whole and is_unbound_axis(error)):
                raise
            again = functools.partial(loss, model, data, key)
            return jax.vmap(again, (), None, axis_name=DATA, axis_size=1)()
    except Exception as error:
        if is_unbound_axis(error):
            raise LossError(
                f"the loss reduces over the replicas itself ({error}".partition(". ")[0] + "); "
                "Replicax already does that once: remove the reduction, or use rx.gather(x); for a "
                "module's statistics, use mode='jit'"
            ) from error
        if key is None and not isinstance(error, ReplicaxError):
            error.add_note("evaluation passes key=None: draw random numbers only with a key")
        raise


def is_unbound_axis(error: Exception) -> bool:
    """Whether JAX raised `error` about a mesh axis; a NameError of Python has the name."""
    return type(error) is NameError and error.name is None


def sums(returned: Any, mask: jax.Array, counts: Any = None) -> dict[str, WeightedSum]:
    """Return the sums behind the return value of a loss, `"loss"` first, then the metrics.

    A loss returns float values `[rows, ...]`, a `Weighted`, a scalar (the mean over the rows), or
    any of these paired with a dict of metrics of the same kinds; anything else raises `LossError`.
    `mask` is 0 on padding, and `counts`, given if the loss is differentiated, is the number of real
    rows of the whole batch, of each row. Metrics that are no means are left to `merged_of`.
    """
    named = values_by_name(returned)
    dtype = jnp.result_type(_values(named[LOSS]))
    if not jnp.issubdtype(dtype, jnp.floating):
        raise LossError(
            f"the loss has dtype {dtype}; a gradient needs a real floating-point loss: return "
            "floats, and report counts as metrics"
        )
    weighted = {
        name: weighted_sum(name, value, mask)
        for name, value in named.items()
        if not isinstance(value, ByRow) and _as_metric(value) is None
    }
    if counts is None:
        return weighted
    values = to_sum(jnp.asarray(_values(named[LOSS])))
    shares = mask.astype(values.dtype) / (counts * math.prod(values.shape[1:]))
    mean = weighted_sum(LOSS, named[LOSS], shares)
    loss = dataclasses.replace(weighted[LOSS], seeded=mean.total, divisor=mean.weight)
    return {**weighted, LOSS: loss}


def rows_of(returned: Any, count: int, *, every: bool) -> dict[str, PyTree]:
    """Return what a loss returned for each of `count` rows: each `ByRow`, or `every` value."""
    found = {}
    for name, value in values_by_name(returned).items():
        if isinstance(value, ByRow):
            found[name] = checked_rows(name, value.value, count)
        elif every and _as_metric(value) is None and jnp.ndim(_values(value)):
            found[name] = jnp.asarray(_values(value))
    return found


def merged_of(returned: Any, mask: jax.Array) -> dict[str, Merged]:
    """Return metrics that are no means, of one part: the rows of `mask`."""
    known = {name: _as_metric(value) for name, value in values_by_name(returned).items()}
    return {name: apart(name, *metric, mask) for name, metric in known.items() if metric}


def _as_metric(value: Any) -> tuple[Any, Merge] | None:
    return None if isinstance(value, jax.Array | Weighted) else as_metric(value)


def values_by_name(returned: Any) -> dict[str, Any]:
    """Return the loss and the metrics by name."""
    if not isinstance(returned, tuple):
        return {LOSS: returned}
    if len(returned) != 2 or not isinstance(returned[1], dict):
        kinds = ", ".join(map(_kind, returned))
        raise LossError(
            f"the loss returned a tuple of ({kinds}); it must return values, or a pair of values "
            "and a dict of metrics: return only values, or put the rest in a dict by name"
        )
    if unnamed := [name for name in returned[1] if not isinstance(name, str)]:
        raise LossError(
            f"the loss returned a metric with the key {unnamed[0]!r}; metrics have names: use "
            "strings"
        )
    taken = sorted(set(RESERVED) & set(returned[1]))
    if taken:
        raise LossError(f"the loss returned a metric {taken[0]!r}, a reserved name: rename it")
    return {LOSS: returned[0], **returned[1]}


def has_weights(returned: Any) -> bool:
    """Whether a loss returned weights that could have a derivative."""
    value = values_by_name(returned)[LOSS]
    return isinstance(value, Weighted) and jnp.issubdtype(
        jnp.result_type(value.weights), jnp.inexact
    )


def _kind(value: Any) -> str:
    """Return `float32[8,10]`, or the type name if `value` is not an array."""
    return str(jax.typeof(value)) if isinstance(value, jax.Array) else type(value).__name__


def _values(value: Any) -> Any:
    values = value.values if isinstance(value, Weighted) else value
    if not isinstance(values, (jax.Array, float, int)) and not hasattr(values, "dtype"):
        raise LossError(
            f"the loss returned a {type(values).__name__}; it must return an array [rows, ...], an "
            "rx.Weighted, or a pair of either and a dict of metrics"
        )
    return values


def weighted_sum(name: str, value: Any, mask: jax.Array, axis: int | None = None) -> WeightedSum:
    """Return the sum behind one value of a loss's result; errors refer to it as `name`.

    It is the sum over all dims, or over the rows alone if `axis` is 0.
    """
    values = to_sum(jnp.asarray(_values(value)))
    if values.ndim == 0:
        if isinstance(value, Weighted):
            raise LossError(f"{name}: rx.Weighted contains a scalar; pass values [rows, ...]")
        weight = jnp.sum(mask)
        return WeightedSum(values * weight, weight)
    if values.shape[0] != mask.shape[0]:
        raise LossError(
            f"{name} has shape {values.shape} and the batch has {mask.shape[0]} rows; its leading "
            "dim must be the row dim: return one value per row, before any mean"
        )
    weights = _to_dims(mask, values.ndim)
    if isinstance(value, Weighted):
        weights = weights * _weights(name, value, values)
    weights = jnp.broadcast_to(weights, values.shape)
    # A value with zero weight may be anything, including NaN and infinity.
    rows_counted = jnp.where(weights != 0, values, 0)
    return WeightedSum(jnp.sum(rows_counted * weights, axis), jnp.sum(weights, axis))


def _weights(name: str, value: Weighted, values: jax.Array) -> jax.Array:
    weights = jax.lax.stop_gradient(to_sum(jnp.asarray(value.weights)))
    if not weights.ndim or weights.shape != values.shape[: weights.ndim]:
        raise LossError(
            f"{name} has values of shape {values.shape} and weights of shape {weights.shape}; "
            "weights must have the values' shape or its leading dims: reshape the weights"
        )
    return _to_dims(weights, values.ndim)


def _to_dims(array: jax.Array, dims: int) -> jax.Array:
    return array.reshape(array.shape + (1,) * (dims - array.ndim))


def rows_counted(mask: jax.Array) -> WeightedSum:
    """Return the number of rows as `total + _COUNT * weight`: float32 alone ends at 2**24."""
    count = jnp.sum(mask.astype(jnp.int32))
    return WeightedSum(*(part.astype(jnp.float32) for part in (count % _COUNT, count // _COUNT)))


class Totals:
    """Sums over many batches, accumulated in float64 on the host."""

    def __init__(self) -> None:
        self._sums: dict[str, np.ndarray] = {}
        self._merging: dict[str, Merging] = {}

    def add(self, sums: dict[str, Any]) -> None:
        """Add the sums, and metrics that are no means, of a batch, waiting for them."""
        for name, value in sums.items():
            if isinstance(value, Merged):
                self._merging.setdefault(name, Merging()).add(value)
                continue
            pair = np.asarray([value.total, value.weight], np.float64)
            self._sums[name] = self._sums.get(name, np.zeros(2)) + pair

    def means(self) -> dict[str, Any]:
        """Return each mean, NaN if the total weight is 0, other metrics, and the number of rows."""
        if not self._sums:
            raise ConfigError("evaluate was given 0 batches; pass at least 1")
        rows, thousands = map(int, self._sums.pop("rows"))
        means: dict[str, Any] = {
            name: float(total) / float(weight) if weight else math.nan
            for name, (total, weight) in self._sums.items()
        }
        for name, merging in self._merging.items():
            means |= named_values(name, merging.compute())
        return {**means, "rows": rows + _COUNT * thousands}
