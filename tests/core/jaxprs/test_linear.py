"""The trace shows which results are linear in an input."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from replicax.core.jaxprs.linear import Linearity, linear_results

Function = Callable[[Any, Any], Any]
"""Takes a value `[4, 3]` and a cotangent of the same shape."""


def in_tiles(x: Any, by: Any) -> Any:
    """Sum products tile by tile, as a loss in tiles does."""

    def tile(total: Any, pair: Any) -> Any:
        own, of = pair
        return total + jnp.outer(jax.nn.softmax(own), of), of * 2

    return lax.scan(tile, jnp.zeros((3, 3)), (x, by))


@jax.custom_vjp
def doubled(by: Any) -> Any:
    return by * 2


doubled.defvjp(lambda by: (by * 2, None), lambda _, by: (by * 2,))
LINEAR: list[Function] = [
    lambda x, by: -0.3 * by + by[::-1] / (1 + x**2),
    lambda x, by: (jax.nn.softmax(x).T @ by, by.sum(0)),
    lambda x, by: jnp.where(x > 0, by, 0),
    lambda x, by: by.astype(jnp.float8_e5m2).astype(jnp.float32) - by.mean(),
    lambda x, by: jnp.zeros((9, 3)).at[jnp.arange(4)].add(by * x),
    lambda x, by: jax.checkpoint(lambda by: jnp.concatenate([by, by * 0], 1))(by),
    lambda x, by: lax.cond(x[0, 0] > 0, lambda by: by * 2, jnp.zeros_like, by),
    in_tiles,
    lambda x, by: lax.optimization_barrier((x * x, by))[1],
    lambda x, by: doubled(by),
]
OTHER: list[Function] = [
    lambda x, by: jnp.clip(by, -1, 1),
    lambda x, by: by * by,
    lambda x, by: by + 0.01,
    lambda x, by: x,
    lambda x, by: x / by,
    lambda x, by: jnp.where(by > 0, by, 0),
    lambda x, by: jnp.zeros((9, 3)).at[jnp.int32(by[:, 0])].add(by),
    lambda x, by: lax.dynamic_update_slice(by, by[:1], (jnp.int32(by[0, 0]), 0)),
    lambda x, by: lax.scan(lambda total, of: (total + of, of), jnp.ones(3), by),
    lambda x, by: lax.cond(x[0, 0] > 0, lambda by: by, jnp.ones_like, by),
]


@pytest.mark.parametrize("function", [*LINEAR, *OTHER])
def test_what_is_linear_is_shown(function: Function) -> None:
    x = jnp.ones((4, 3))
    found = linear_results(jax.make_jaxpr(function)(x, x), [Linearity.NONE, Linearity.LINEAR])
    assert ({*found} <= {Linearity.LINEAR, Linearity.ZERO}) == (function in LINEAR)
