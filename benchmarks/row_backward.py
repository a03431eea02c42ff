"""Parts with a backward pass of their own: linear in its cotangent, or not."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from row_parts import Part


def backward(change: Callable[[Any, Any], Any]) -> Callable[[Any], Any]:
    """Return the identity with `change(x, g)` for its cotangent `g`."""

    @jax.custom_vjp
    def same(x: Any) -> Any:
        return x

    same.defvjp(lambda x: (x, x), lambda x, g: (change(x, g).astype(g.dtype),))
    return same


def of_rows(change: Callable[[Any, Any], Any]) -> Part:
    same = backward(change)
    return lambda c, z: same(z)


def of_each_row(change: Callable[[Any, Any], Any]) -> Part:
    same = backward(change)
    return lambda c, z: jax.vmap(same)(z)


def of_parameters(change: Callable[[Any, Any], Any]) -> Part:
    same = backward(change)
    return lambda c, z: jnp.tanh(z @ same(c.model["w"]))


@jax.custom_vjp
def _rounded(z: Any) -> Any:
    return jnp.round(z * 4) / 4


_rounded.defvjp(lambda z: (_rounded(z), z), lambda z, g: (g * (jnp.abs(z) < 2),))


@jax.custom_vjp
def _scaled(z: Any, largest: Any) -> Any:
    return z * (1 + largest * 0)


_scaled.defvjp(
    lambda z, largest: (_scaled(z, largest), z),
    lambda z, g: (g, jnp.max(jnp.abs(z))),
)


@jax.custom_jvp
def _smooth(z: Any) -> Any:
    return jnp.logaddexp(z, 0)


_smooth.defjvp(
    lambda primals, tangents: (_smooth(*primals), jax.nn.sigmoid(primals[0]) * tangents[0])
)


@jax.custom_vjp
def _product(w: Any, z: Any) -> Any:
    return z @ w


_product.defvjp(lambda w, z: (z @ w, (w, z)), lambda saved, g: (saved[1].T @ g, g @ saved[0].T))


def _shrunk(x: Any, g: Any) -> Any:
    return g / (jnp.sqrt(jnp.sum(g * g)) + 1e-8)


LINEAR: dict[str, Part] = {
    "rounded, straight through": lambda c, z: _rounded(z),
    "reversed gradient": of_rows(lambda x, g: -0.3 * g),
    "scaled gradient": of_parameters(lambda x, g: 0.5 * g),
    "gradient by value": of_each_row(lambda x, g: g * jnp.tanh(x)),
    "gradient of positive": of_rows(lambda x, g: jnp.where(x > 0, g, 0)),
    "own jvp": lambda c, z: _smooth(z),
    "own product": lambda c, z: jnp.tanh(_product(c.model["w"], z)),
}
CURVED: dict[str, Part] = {
    "clipped gradient": of_rows(lambda x, g: jnp.clip(g, -0.05, 0.05)),
    "clipped widely": of_rows(lambda x, g: jnp.clip(g, -1, 1)),
    "gradient by its norm": of_each_row(_shrunk),
    "gradient by its norm alone": of_each_row(lambda x, g: g / jnp.linalg.norm(g)),
    "gradient by the norm of all": of_rows(_shrunk),
    "sign of the gradient": of_rows(lambda x, g: jnp.sign(g) / 16),
    "clipped gradient of parameters": of_parameters(lambda x, g: jnp.clip(g, -0.1, 0.1)),
    "gradient that is large": of_rows(lambda x, g: jnp.where(jnp.abs(g) > 0.1, g, 0)),
    "gradient and a constant": of_each_row(lambda x, g: g + 0.01),
    "a value for a gradient": lambda c, z: _scaled(z, c.model["gate"]),
    "gradient, squared": of_rows(lambda x, g: g * jnp.abs(g)),
    "centred gradient": of_rows(lambda x, g: g - g.mean(0)),
    "largest gradient": of_rows(lambda x, g: g / (1 + jnp.abs(g).max())),
}
"""They are not linear, or mix rows."""
