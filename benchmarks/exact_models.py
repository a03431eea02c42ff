"""Layers of which the models of a search for other bits in mode `exact` are made."""

from collections.abc import Callable
from typing import Any

import exact_layers
import jax
import jax.numpy as jnp
import numpy as np
from exact_layers import Layer, Params, matrices, normal
from jax import lax


def _none(random: np.random.Generator, features: int, width: int) -> Params:
    return {}


def _dense(activation: Callable[[jax.Array], jax.Array]) -> Layer:
    def init(random: np.random.Generator, d: int, w: int) -> Params:
        return {"w": normal(random, d, w), "b": normal(random, w, scale=0.1)}

    return Layer(init, lambda p, x, key: activation(x @ p["w"] + p["b"]))


def _function(apply: Callable[[jax.Array], jax.Array]) -> Layer:
    return Layer(_none, lambda p, x, key: apply(x))


def _affine(random: np.random.Generator, d: int, w: int) -> Params:
    return {"g": 1 + normal(random, d, scale=0.1), "b": normal(random, d, scale=0.1)}


def _layer_norm(p: Any, x: jax.Array, key: Any) -> jax.Array:
    centered = x - jnp.mean(x, -1, keepdims=True)
    return centered * lax.rsqrt(jnp.var(x, -1, keepdims=True) + 1e-5) * p["g"] + p["b"]


def _rms_norm(p: Any, x: jax.Array, key: Any) -> jax.Array:
    return x / jnp.sqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6) * p["g"] + p["b"]


def _unit(x: jax.Array) -> jax.Array:
    return x / jnp.linalg.norm(x, axis=-1, keepdims=True)


def _dropout(p: Any, x: jax.Array, key: Any) -> jax.Array:
    if key is None:
        return x
    return jnp.where(jax.random.bernoulli(key, 0.7, x.shape), x / 0.7, 0)


def _noise(p: Any, x: jax.Array, key: Any) -> jax.Array:
    return x if key is None else x + p["s"] * jax.random.normal(jax.random.fold_in(key, 1), x.shape)


def _of_bfloat16(random: np.random.Generator, d: int, w: int) -> Params:
    half = normal(random, d, w).astype(jnp.bfloat16)
    return {"w": half, "v": normal(random, d, w), "b": np.zeros(w, jnp.bfloat16)}


def _bfloat16(p: Any, x: jax.Array, key: Any) -> jax.Array:
    low = x.astype(jnp.bfloat16) @ p["w"] + p["b"]
    return jnp.tanh(low).astype(jnp.float32) + x @ p["v"]


def _of_scales(random: np.random.Generator, d: int, w: int) -> Params:
    return {"a": normal(random, d, w), "b": normal(random, d, w), "c": normal(random, d, w) / 1e9}


def _scales(p: Any, x: jax.Array, key: Any) -> jax.Array:
    """Gradients of 1e-12 beside some of 1e9."""
    return jnp.tanh(x @ p["a"]) + 1e-12 * (x @ p["b"]) + 1e9 * (x @ p["c"])


def _embed(p: Any, x: jax.Array, key: Any) -> jax.Array:
    word = jnp.floor(5 * jax.nn.sigmoid(x[:, 0])).astype(jnp.int32)
    return p["table"][word] * (1 + jnp.mean(x, -1, keepdims=True))


def _weight_norm(p: Any, x: jax.Array, key: Any) -> jax.Array:
    return x @ (p["w"] / jnp.linalg.norm(p["w"], axis=0)) * jnp.sqrt(jnp.mean(p["v"] ** 2))


def _spectral(p: Any, x: jax.Array, key: Any) -> jax.Array:
    u = jnp.ones(p["w"].shape[1])
    for _ in range(2):
        v = p["w"] @ u
        u = p["w"].T @ (v / jnp.linalg.norm(v))
    return x @ p["w"] / (1e-3 + jnp.linalg.norm(lax.stop_gradient(u)))


def _solve(p: Any, x: jax.Array, key: Any) -> jax.Array:
    gram = jnp.eye(p["w"].shape[1]) + p["w"].T @ p["w"]
    return jnp.linalg.solve(gram, (x @ p["w"]).T).T


def _descent(p: Any, x: jax.Array, key: Any) -> jax.Array:
    energy = jax.grad(lambda each: jax.nn.logsumexp(each @ p["w"]))
    return x - 0.5 * jax.vmap(energy)(x)


def _of_low_rank(random: np.random.Generator, d: int, w: int) -> Params:
    return {"a": normal(random, d, 2), "b": normal(random, 2, w)}


LAYERS: dict[str, Layer] = {
    **{f.__name__: _dense(f) for f in (jnp.tanh, jax.nn.relu, jax.nn.gelu, jax.nn.silu, jnp.sin)},
    "linear": _dense(lambda x: x),
    "twins": Layer(matrices("a", "c"), lambda p, x, key: x @ p["a"] + jnp.tanh(x @ p["c"])),
    "tied": Layer(matrices("w"), lambda p, x, key: jnp.tanh(x @ p["w"]) @ p["w"].T),
    "low_rank": Layer(_of_low_rank, lambda p, x, key: x @ (p["a"] @ p["b"])),
    "layer_norm": Layer(_affine, _layer_norm),
    "rms_norm": Layer(_affine, _rms_norm),
    "unit": _function(_unit),
    "softmax": _function(jax.nn.softmax),
    "log_softmax": _function(jax.nn.log_softmax),
    "cumsum": _function(lambda x: jnp.cumsum(x, -1) / x.shape[-1]),
    "cummax": _function(lambda x: lax.cummax(x, axis=1)),
    "max": _function(lambda x: x - jnp.max(x, -1, keepdims=True) * jnp.mean(x, -1, keepdims=True)),
    "sort": _function(lambda x: jnp.sort(x, -1) + x),
    "fft": _function(lambda x: jnp.real(jnp.fft.fft(x)) / x.shape[-1]),
    "straight": _function(lambda x: x + lax.stop_gradient(jnp.round(x) - x)),
    "dropout": Layer(_none, _dropout),
    "noise": Layer(lambda random, d, w: {"s": normal(random, d, scale=0.1)}, _noise),
    "bfloat16": Layer(_of_bfloat16, _bfloat16),
    "scales": Layer(_of_scales, _scales),
    "embed": Layer(lambda random, d, w: {"table": normal(random, 5, w)}, _embed),
    "weight_norm": Layer(matrices("w", "v"), _weight_norm),
    "spectral": Layer(matrices("w"), _spectral),
    "solve": Layer(matrices("w"), _solve),
    "descent": Layer(matrices("w"), _descent),
    **exact_layers.LAYERS,
}
"""By name."""
