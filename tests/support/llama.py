"""Llama in Flax NNX as its users write it, and the table of its published names."""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

import replicax as rx


@dataclasses.dataclass(frozen=True)
class Sizes:
    vocab: int = 61
    width: int = 32
    hidden: int = 48
    layers: int = 2
    heads: int = 4
    groups: int = 2
    """Heads of keys and values, each shared by several of queries."""


def dense(inputs: int, outputs: int, rngs: nnx.Rngs) -> nnx.Linear:
    return nnx.Linear(inputs, outputs, use_bias=False, rngs=rngs)


def rotated(x: jax.Array) -> jax.Array:
    """Rotary position embedding of `[rows, tokens, heads, head_dim]`."""
    half = x.shape[-1] // 2
    angles = jnp.arange(x.shape[1])[:, None] * 10_000.0 ** -(jnp.arange(half) / half)
    cos, sin = jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]
    first, second = x[..., :half], x[..., half:]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1)


class Attention(nnx.Module):
    def __init__(self, sizes: Sizes, rngs: nnx.Rngs) -> None:
        self.head = sizes.width // sizes.heads
        self.q = dense(sizes.width, sizes.width, rngs)
        self.k = dense(sizes.width, sizes.groups * self.head, rngs)
        self.v = dense(sizes.width, sizes.groups * self.head, rngs)
        self.o = dense(sizes.width, sizes.width, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        q, k, v = (
            layer(x).reshape(*x.shape[:2], -1, self.head) for layer in (self.q, self.k, self.v)
        )
        attended = jax.nn.dot_product_attention(rotated(q), rotated(k), v, is_causal=True)
        return self.o(attended.reshape(x.shape))


class SwiGLU(nnx.Module):
    def __init__(self, sizes: Sizes, rngs: nnx.Rngs) -> None:
        self.gate = dense(sizes.width, sizes.hidden, rngs)
        self.up = dense(sizes.width, sizes.hidden, rngs)
        self.down = dense(sizes.hidden, sizes.width, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(nnx.silu(self.gate(x)) * self.up(x))


class Block(nnx.Module):
    def __init__(self, sizes: Sizes, rngs: nnx.Rngs) -> None:
        self.norm1 = nnx.RMSNorm(sizes.width, rngs=rngs)
        self.attn = Attention(sizes, rngs)
        self.norm2 = nnx.RMSNorm(sizes.width, rngs=rngs)
        self.mlp = SwiGLU(sizes, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Llama(nnx.Module):
    def __init__(self, sizes: Sizes, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(sizes.vocab, sizes.width, rngs=rngs)
        self.layers = nnx.List([Block(sizes, rngs) for _ in range(sizes.layers)])
        self.norm = nnx.RMSNorm(sizes.width, rngs=rngs)
        self.head = dense(sizes.width, sizes.vocab, rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


transposed = rx.weights.transposed
NAMES = {
    r"model.embed_tokens.weight": "embed.embedding",
    r"model.layers.(\d+).input_layernorm.weight": r"layers.\1.norm1.scale",
    r"model.layers.(\d+).post_attention_layernorm.weight": r"layers.\1.norm2.scale",
    r"model.layers.(\d+).self_attn.(q|k|v|o)_proj.weight": transposed(r"layers.\1.attn.\2.kernel"),
    r"model.layers.(\d+).mlp.(\w+)_proj.weight": transposed(r"layers.\1.mlp.\2.kernel"),
    r"model.norm.weight": "norm.scale",
    r"lm_head.weight": transposed("head.kernel"),
}
