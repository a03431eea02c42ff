"""Layers of experts, branches, loops, convolution and attention, for `exact_models`.

A layer is `init(random, features, width) -> parameters` and `apply(parameters, x, key)`, with `x`
`[rows, features]` and a key that is None in evaluation. No row sees another.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import replicax as rx

Params = dict[str, np.ndarray]
Init = Callable[[np.random.Generator, int, int], Params]
Apply = Callable[[Any, jax.Array, Any], jax.Array]


@dataclasses.dataclass(frozen=True)
class Layer:
    """A layer."""

    init: Init
    apply: Apply


def normal(random: np.random.Generator, *shape: int, scale: float = 1.0) -> np.ndarray:
    """Numbers of this scale, divided by the root of the rows of a matrix."""
    rows = shape[-2] if len(shape) > 1 else 1
    return (scale * random.normal(size=shape) / np.sqrt(rows)).astype(np.float32)


def matrices(*names: str, scale: float = 1.0) -> Init:
    """Matrices `[features, width]`, one for each name."""
    return lambda random, d, w: {name: normal(random, d, w, scale=scale) for name in names}


def _of_experts(random: np.random.Generator, d: int, w: int) -> Params:
    return {"gate": normal(random, d, 4), "w": normal(random, 4, d, w)}


def _experts_taken(p: Any, x: jax.Array, key: Any) -> jax.Array:
    """Each row takes the matrices of its best two experts: their gradient is scattered."""
    best, which = lax.top_k(jax.nn.softmax(x @ p["gate"]), 2)
    return jnp.einsum("nk,nd,nkdw->nw", best, x, p["w"][which])


def _experts_masked(p: Any, x: jax.Array, key: Any) -> jax.Array:
    best, which = lax.top_k(x @ p["gate"], 2)
    share = jnp.sum(jax.nn.softmax(best)[..., None] * jax.nn.one_hot(which, 4), 1)
    return jnp.einsum("ne,new->nw", share, jnp.tanh(jnp.einsum("nd,edw->new", x, p["w"])))


def _cond(p: Any, x: jax.Array, key: Any) -> jax.Array:
    return lax.cond(
        jnp.sum(p["w"]) > 0, lambda: jnp.tanh(x @ p["w"]), lambda: x @ p["w"] + jnp.sin(x @ p["v"])
    )


def _by_step(p: Any, x: jax.Array, key: Any) -> jax.Array:
    odd = rx.step_number() % 2
    return lax.switch(odd, [lambda: jax.nn.relu(x @ p["w"]), lambda: x @ (p["w"] - p["v"])])


def _stacked(random: np.random.Generator, d: int, w: int) -> Params:
    return {"w": normal(random, 3, d, d), "b": normal(random, 3, d, scale=0.1)}


def _layers_scan(p: Any, x: jax.Array, key: Any) -> jax.Array:
    turn = jax.checkpoint(lambda x, each: (x + jnp.tanh(x @ each["w"] + each["b"]), None))
    return lax.scan(turn, x, p)[0]


def _of_time(random: np.random.Generator, d: int, w: int) -> Params:
    return {"in": normal(random, w), "w": normal(random, w, w), "b": normal(random, w)}


def _time_scan(p: Any, x: jax.Array, key: Any) -> jax.Array:
    def turn(hidden: jax.Array, each: jax.Array) -> tuple[jax.Array, jax.Array]:
        hidden = jnp.tanh(each[:, None] * p["in"] + hidden @ p["w"] + p["b"])
        return hidden, jnp.mean(hidden, -1)

    begin = jnp.zeros((x.shape[0], p["b"].shape[0]))
    last, means = lax.scan(turn, begin, x.T, unroll=1, reverse=x.shape[1] % 2 == 0)
    return last + jnp.sum(means, 0)[:, None]


def _fori(p: Any, x: jax.Array, key: Any) -> jax.Array:
    return lax.fori_loop(0, 3, lambda n, h: h - 0.1 * jnp.tanh(h @ p["w"]) @ p["w"].T, x)


def _conv_1d(p: Any, x: jax.Array, key: Any) -> jax.Array:
    found = lax.conv_general_dilated(
        x[:, :, None],
        p["k"].astype(x.dtype),
        (1,),
        "SAME",
        dimension_numbers=("NWC", "WIO", "NWC"),
    )
    return jnp.mean(jax.nn.relu(found), 1)


def _of_images(random: np.random.Generator, d: int, w: int) -> Params:
    return {"k": normal(random, 3, 3, 1, w), "d": normal(random, 3, 3, 1, w)}


def _conv_2d(p: Any, x: jax.Array, key: Any) -> jax.Array:
    """Strided, grouped, and pooled: rows as images of 6 x 6."""
    first, second = p["k"].astype(x.dtype), p["d"].astype(x.dtype)
    found = lax.conv_general_dilated(
        _tiled(x, 36).reshape(-1, 6, 6, 1), first, (1, 1), "VALID", dimension_numbers=_IMAGES
    )
    found = lax.conv_general_dilated(
        found,
        second,
        (2, 2),
        "SAME",
        dimension_numbers=_IMAGES,
        feature_group_count=found.shape[-1],
    )
    return lax.reduce_window(found, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 1, 1, 1), "VALID")[:, 0, 0]


_IMAGES = ("NHWC", "HWIO", "NHWC")


def _tiled(x: jax.Array, size: int) -> jax.Array:
    """`x` again and again, `size` features."""
    return jnp.tile(x, (1, -(-size // x.shape[1])))[:, :size]


def _of_attention(random: np.random.Generator, d: int, w: int) -> Params:
    return {name: normal(random, 3, w) for name in ("q", "k", "v")} | {"p": normal(random, 5, w)}


def _attention(p: Any, x: jax.Array, key: Any) -> jax.Array:
    tokens = _tiled(x, 15).reshape(-1, 5, 3)
    q, k, v = (tokens @ p[name] + p["p"] for name in ("q", "k", "v"))
    scores = jnp.einsum("nqw,nkw->nqk", q, k) / np.sqrt(q.shape[-1]).astype(np.float32)
    scores = jnp.where(jnp.tril(jnp.ones((5, 5), bool)), scores, -1e9)
    return jnp.einsum("nqk,nkw->nqw", jax.nn.softmax(scores), v)[:, -1]


LAYERS: dict[str, Layer] = {
    "experts": Layer(_of_experts, _experts_taken),
    "experts_masked": Layer(_of_experts, _experts_masked),
    "cond": Layer(matrices("w", "v"), _cond),
    "by_step": Layer(matrices("w", "v"), _by_step),
    "layers_scan": Layer(_stacked, _layers_scan),
    "time_scan": Layer(_of_time, _time_scan),
    "fori": Layer(matrices("w"), _fori),
    "conv_1d": Layer(lambda random, d, w: {"k": normal(random, 3, 1, w)}, _conv_1d),
    "conv_2d": Layer(_of_images, _conv_2d),
    "attention": Layer(_of_attention, _attention),
}
"""By name."""
