"""Metrics of other libraries as objects that can be merged."""

import sys
from typing import Any

import jax

from replicax.core.data.merged import Merge
from replicax.errors import LossError


def as_metric(value: Any) -> tuple[Any, Merge] | None:
    """Return an object with arrays that can be merged, and how; None if `value` is no such object.

    It has `merge` and `compute`, or is a metric of Flax NNX, which has no `merge`.
    """
    if _merges(value):
        return value, _own
    if isinstance(value, getattr(sys.modules.get("flax.nnx"), "Metric", ())):
        held = [each for each in vars(value).values() if _merges(each)]
        if len(held) == 1:  # a wrapper of one, as those of metrax.nnx
            return held[0], _own
        return value, _merged_nnx
    return None


def _merges(value: Any) -> bool:
    is_object = not isinstance(value, type)
    return is_object and all(callable(getattr(value, each, None)) for each in ("merge", "compute"))


def _own(metric: Any, other: Any) -> Any:
    return metric.merge(other)


def _merged_nnx(metric: Any, other: Any) -> Any:
    """Return a new metric of the updates of both."""
    import flax.nnx

    known = flax.nnx.metrics
    if isinstance(metric, known.MultiMetric):
        found = jax.tree.map(lambda leaf: leaf, metric)
        for name, each in vars(metric).items():
            if isinstance(each, known.Metric):
                setattr(found, name, _merged_nnx(each, getattr(other, name)))
        return found
    if isinstance(metric, known.Welford):
        return _merged_welford(metric, other)
    if isinstance(metric, known.Average):
        return jax.tree.map(lambda a, b: a + b, metric, other)
    kind = type(metric).__name__
    raise LossError(f"the metric {kind} has no merge(other): define it, or pass rx.HostMetric")


def _merged_welford(metric: Any, other: Any) -> Any:
    """Return the mean and the squared deviations of the values of both (Chan et al., 1979)."""
    counts, means, squares = (
        [getattr(each, name)[...] for each in (metric, other)] for name in ("count", "mean", "m2")
    )
    count, apart = counts[0] + counts[1], means[1] - means[0]
    share = counts[1] / (count + (count == 0))
    found = jax.tree.map(lambda leaf: leaf, metric)
    found.count.set_value(count)
    found.mean.set_value((means[0] + apart * share).astype(means[0].dtype))
    moved = apart * apart * counts[0] * share
    found.m2.set_value((squares[0] + squares[1] + moved).astype(means[0].dtype))
    return found
