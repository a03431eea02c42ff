"""The GPT-2 network: learned positions, pre-norm blocks, GELU, the embedding tied to the output.

Radford et al., "Language Models are Unsupervised Multitask Learners" (2019). Parameters have the
names and shapes of the published weights, with two exceptions. Those of all blocks are stacked: `h`
holds arrays `[layers, ...]`, and one `lax.scan` runs over them. And `c_attn` has a dim of its own
for query, key and value, `[width, 3, width]`, so that its last dim can be split by heads.

Activations are `[rows * tokens, width]`. XLA's CPU backend differentiates a product of two matrices
without copies; of `[rows, tokens, width]` and a matrix it transposes whatever led to it once more.
"""

import dataclasses
import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from replicax.core.precision import to_sum
from replicax.errors import ConfigError
from replicax.recipes import attention

Params = dict[str, Any]
Remat = Literal["none", "selective", "full"]
EPSILON = 1e-5
PRODUCT = "product"


@dataclasses.dataclass(frozen=True)
class Shape:
    """The sizes of a network."""

    layers: int
    heads: int
    width: int
    context: int
    """Most tokens in a row."""
    vocab_size: int

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if getattr(self, field.name) < 1:
                raise ConfigError(
                    f"{field.name}={getattr(self, field.name)}; it is at least 1: raise it"
                )
        if self.width % self.heads:
            raise ConfigError(
                f"width={self.width} and heads={self.heads}; each head has width / heads dims: "
                "make the width a multiple of the heads"
            )


def init(shape: Shape, key: jax.Array) -> Params:
    """GPT-2's: normal weights, those that add to the residual stream smaller, biases of 0."""
    layers, width = shape.layers, shape.width
    keys = iter(jax.random.split(key, 6))

    def norm(*stack: int) -> Params:
        return {"weight": jnp.ones((*stack, width)), "bias": jnp.zeros((*stack, width))}

    def matrix(*dims: int, deviation: float = 0.02) -> jax.Array:
        return deviation * jax.random.normal(next(keys), dims)

    def dense(inputs: int, outputs: int, deviation: float = 0.02) -> Params:
        weight = matrix(layers, inputs, outputs, deviation=deviation)
        return {"weight": weight, "bias": jnp.zeros((layers, outputs))}

    def query_key_value() -> Params:
        published = dense(width, 3 * width)
        weight = published["weight"].reshape(layers, width, 3, width)
        return {"weight": weight, "bias": published["bias"].reshape(layers, 3, width)}

    to_residual = 0.02 / math.sqrt(2 * layers)
    return {
        "wte": {"weight": matrix(shape.vocab_size, width)},
        "wpe": {"weight": matrix(shape.context, width, deviation=0.01)},
        "h": {
            "ln_1": norm(layers),
            "attn": {
                "c_attn": query_key_value(),
                "c_proj": dense(width, width, to_residual),
            },
            "ln_2": norm(layers),
            "mlp": {
                "c_fc": dense(width, 4 * width),
                "c_proj": dense(4 * width, width, to_residual),
            },
        },
        "ln_f": norm(),
    }


def logits(params: Params, tokens: jax.Array, heads: int, remat: Remat = "none") -> jax.Array:
    """Logits of the next token after each.

    Args:
        params: of any sizes, as `init` gives them.
        tokens: ints `[rows, tokens]`, no more of them than the context.
        heads: of the attention; the parameters do not tell.
        remat: what the backward pass computes again; see `_keep`.

    Returns:
        `[rows, tokens, vocab_size]`, in the dtype of the parameters.
    """
    rows, count = tokens.shape
    embedding, positions = params["wte"]["weight"], params["wpe"]["weight"]
    x = (embedding[tokens] + positions[:count]).reshape(rows * count, -1)

    def layer(x: jax.Array, block: Params) -> tuple[jax.Array, None]:
        return _block(block, x, (rows, count, heads)), None

    x, _ = lax.scan(_keep(layer, remat), x, params["h"])
    x = _layer_norm(params["ln_f"], x)
    scores: jax.Array = x @ embedding.T
    return scores.reshape(rows, count, -1)


def _keep(layer: Any, remat: Remat) -> Any:
    """`layer` with what its backward pass computes again.

    - none: nothing; all that it needs is kept
    - selective: norms and GELU; the products and the attention's output are kept
    - full: everything; only the input is kept
    """
    if remat == "none":
        return layer
    policies = jax.checkpoint_policies
    policy = {
        "selective": policies.save_only_these_names(PRODUCT, attention.SAVED),
        "full": policies.nothing_saveable,
    }[remat]
    return jax.checkpoint(layer, policy=policy, prevent_cse=False)


def _block(params: Params, x: jax.Array, sizes: tuple[int, int, int]) -> jax.Array:
    rows, tokens, heads = sizes
    qkv = _product(params["attn"]["c_attn"], _layer_norm(params["ln_1"], x))
    by_head = (each.reshape(rows, tokens, heads, -1) for each in jnp.split(qkv, 3, axis=-2))
    attended = attention.causal_attention(*by_head).reshape(x.shape)
    x = x + _product(params["attn"]["c_proj"], attended)
    hidden = _product(params["mlp"]["c_fc"], _layer_norm(params["ln_2"], x))
    hidden = jax.nn.gelu(hidden, approximate=True)
    return x + _product(params["mlp"]["c_proj"], hidden)


def _product(params: Params, x: jax.Array) -> jax.Array:
    """`x` `[..., inputs]` times a weight `[inputs, ...]`, in one product."""
    product = jnp.tensordot(x, params["weight"], 1) + params["bias"]
    named: jax.Array = checkpoint_name(product, PRODUCT)
    return named


def _layer_norm(params: Params, x: jax.Array) -> jax.Array:
    wide = to_sum(x)
    mean = jnp.mean(wide, axis=-1, keepdims=True)
    variance = jnp.mean(jnp.square(wide - mean), axis=-1, keepdims=True)
    normal = ((wide - mean) * lax.rsqrt(variance + EPSILON)).astype(x.dtype)
    scaled: jax.Array = normal * params["weight"] + params["bias"]
    return scaled
