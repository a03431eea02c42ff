"""The words of a drawn program, twice: in plain JAX for the real rows alone, and in Replicax.

A program is written once. What it computes on one device is defined here by `OneDevice`, which
uses nothing of Replicax: a mean is `jnp.mean` over the rows that are there.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import replicax as rx


class Weights(NamedTuple):
    """Values with weights, whose mean is one quotient of sums."""

    values: Any
    weights: Any


def wide(x: Any) -> Any:
    """Return an array in float32, or float64 if it is that."""
    return jnp.asarray(x).astype(jnp.promote_types(jnp.asarray(x).dtype, jnp.float32))


class OneDevice:
    """One device without Replicax, which sees all rows and no padding."""

    weighted = Weights

    def __init__(self, number: Any) -> None:
        self._number = number

    def step_number(self) -> Any:
        return self._number

    @staticmethod
    def gather(rows: Any) -> Any:
        return rows

    @staticmethod
    def row_weights(rows: Any) -> Any:
        return jnp.ones(len(rows), jnp.float32)

    @staticmethod
    def mean(value: Any) -> Any:
        if isinstance(value, Weights):
            weights = jnp.broadcast_to(wide(value.weights), value.values.shape)
            weights = jax.lax.stop_gradient(weights)
            return jnp.sum(wide(value.values) * weights) / jnp.sum(weights)
        return jnp.mean(wide(value))

    def value_and_grad(self, loss: Callable[..., Any]) -> Callable[..., Any]:
        def total(model: Any, batch: Any, key: Any) -> Any:
            found = loss(model, batch, key)
            values, metrics = found if type(found) is tuple else (found, {})
            named = {"loss": values, **metrics}
            means = {name: self.mean(value) for name, value in named.items()}
            return means["loss"], means

        def run(model: Any, batch: Any, key: Any) -> Any:
            (_, means), gradient = jax.value_and_grad(total, has_aux=True)(model, batch, key)
            return means, gradient

        return run


class Replicax:
    """The same words as they are meant to be used."""

    weighted = staticmethod(rx.Weighted)
    gather = staticmethod(rx.gather)
    row_weights = staticmethod(rx.row_weights)
    value_and_grad = staticmethod(rx.value_and_grad)
    step_number = staticmethod(rx.step_number)
