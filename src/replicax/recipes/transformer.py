"""The GPT-2 network: learned positions, pre-norm blocks, GELU, the embedding tied to the output.

Radford et al., "Language Models are Unsupervised Multitask Learners" (2019). Parameters have the
names and shapes of the published weights, with two exceptions. The blocks are stacked: `h` holds
arrays `[layers, ...]`, and one `lax.scan` runs over them. `c_attn` has a separate dim for query,
key and value, `[width, 3, width]`, so that its last dim can be split by heads.

Activations are `[rows * tokens, width]`: XLA's CPU backend differentiates a product of two matrices
without copies, but adds a transpose for a product of `[rows, tokens, width]` and a matrix.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from replicax.core.ground.precision import to_sum
from replicax.core.ground.traced_for import cuda_capability
from replicax.errors import ConfigError
from replicax.recipes import cpu
from replicax.recipes.flash3 import check_flash3, flash3
from replicax.remat import in_turn, with_attention
from replicax.text.arguments import Count, typed
from replicax.weights import rearranged, stacked, tied
from replicax.weights.rename_table import Rename
from replicax.weights.save_weights import named_weights

Params = dict[str, Any]
Remat = Literal["none", "selective", "full"]
Attention = Literal["cudnn", "fa3"]
EPSILON = 1e-5
MATRICES = {
    r"c_attn'\]\['weight'\]": (1, 3),
    r"c_(proj|fc)'\]\['weight'\]": (1, 2),
}
"""Dims of the rows and columns of the matrices of the blocks, for `rx.optimizers.muon`."""


@typed
@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes of the network."""

    layers: Count
    heads: Count
    width: Count
    context: Count
    """Maximum number of tokens in a row."""
    vocab_size: Count

    def __post_init__(self) -> None:
        if self.width % self.heads:
            raise ConfigError(
                f"width={self.width} and heads={self.heads}; each head has width / heads dims: "
                "make the width a multiple of the heads"
            )


def init(shape: Shape, key: jax.Array) -> Params:
    """Initialize as GPT-2: normal weights, smaller for residual outputs, and zero biases."""
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


def logits(
    params: Params,
    tokens: jax.Array,
    heads: int,
    remat: Remat = "none",
    separator: int | None = None,
) -> jax.Array:
    """Return next-token logits `[rows, tokens, vocab_size]`; see `hidden`."""
    scores: jax.Array = hidden(params, tokens, heads, remat, separator) @ params["wte"]["weight"].T
    return scores.reshape(*tokens.shape, -1)


def hidden(
    params: Params,
    tokens: jax.Array,
    heads: int,
    remat: Remat = "none",
    separator: int | None = None,
    attention: Attention = "cudnn",
) -> jax.Array:
    """Return final activations `[rows * tokens, width]`; times the embedding, they are logits.

    `tokens` are ints `[rows, tokens]`, at most `context` per row. `remat` sets what the backward
    pass recomputes: nothing; norms and GELU (`selective`); or whole blocks (`full`). With a
    `separator`, each of these tokens begins a document: tokens attend to their own document only,
    and its positions count from 0. On CUDA `attention` names the kernel; `fa3` is
    FlashAttention-3, with which there are no documents.
    """
    rows, count = tokens.shape
    document = positions = None
    if attention == "fa3":
        check_flash3(params["wte"]["weight"].dtype)
    if separator is not None:
        begins, index = tokens == separator, jnp.arange(count)
        document = jnp.cumsum(begins, axis=1)
        positions = index - lax.cummax(jnp.where(begins, index, 0), axis=1)
    on_gpu = cuda_capability() is not None
    attend = functools.partial(_attention, attention=attention)
    layer: Callable[..., jax.Array] = functools.partial(
        _block, sizes=(rows, count, heads), attend=attend, on_gpu=on_gpu
    )
    if remat != "none":
        layer = jax.checkpoint(layer, policy=_KEPT[remat], prevent_cse=on_gpu)

    def next_layer(x: jax.Array, block: Params) -> tuple[jax.Array, None]:
        if on_gpu and remat != "none":
            x, block = in_turn(x, block)
        return layer(x, block, document), None

    x = _embedded(params, tokens, positions).reshape(rows * count, -1)
    # With a loop on a GPU, copies of saved activations would take a third of a step.
    x, _ = lax.scan(next_layer, x, params["h"], unroll=on_gpu)
    return _layer_norm(params["ln_f"], x)


_DENSE = "dense"
"""Name of the outputs of dense layers, which `selective` saves: cuBLAS has added the bias."""
_KEPT = {
    "selective": with_attention(jax.checkpoint_policies.save_only_these_names(_DENSE)),
    "full": jax.checkpoint_policies.nothing_saveable,
}


def _block(
    x: jax.Array,
    params: Params,
    document: jax.Array | None,
    sizes: tuple[int, int, int],
    attend: Callable[..., jax.Array],
    on_gpu: bool,
) -> jax.Array:
    rows, tokens, heads = sizes
    normal = _layer_norm(params["ln_1"], x)
    q, k, v = (
        each.reshape(rows, tokens, heads, -1)
        for each in _query_key_value(params["attn"]["c_attn"], normal, on_gpu)
    )
    attended = attend(q, k, v, document).reshape(x.shape)
    x = x + _dense(params["attn"]["c_proj"], attended)
    fc, normal = params["mlp"]["c_fc"], _layer_norm(params["ln_2"], x)
    # On a GPU, save its input instead of the six arrays that its derivative uses.
    gelu = jax.checkpoint(_gelu, prevent_cse=True) if on_gpu else _gelu
    return x + _dense(params["mlp"]["c_proj"], gelu(_dense(fc, normal)))


def _attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    document: jax.Array | None = None,
    attention: Attention = "cudnn",
) -> jax.Array:
    """Apply causal attention to `[rows, tokens, heads, head_dim]`, with cuDNN if it supports it.

    `document` `[rows, tokens]` numbers the documents that are kept apart.
    """
    operands: tuple[jax.Array, ...] = (q, k, v)
    on_cpu: Callable[..., jax.Array] = cpu.causal_attention
    if document is not None:
        mask = document[:, None, :, None] == document[:, None, None, :]
        operands, on_cpu = (q, k, v, mask), _plain_attention
    attended: jax.Array = lax.platform_dependent(
        *operands, cpu=on_cpu, cuda=_ON_CUDA[attention], default=_plain_attention
    )
    return attended


def _plain_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array | None = None
) -> jax.Array:
    return jax.nn.dot_product_attention(q, k, v, mask=mask, is_causal=True)


def _cuda_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array | None = None
) -> jax.Array:
    # JAX never selects cuDNN by default, and raises if cuDNN does not support the inputs.
    implementation: Literal["cudnn"] | None = "cudnn" if cudnn_takes(q) else None
    return jax.nn.dot_product_attention(
        q, k, v, mask=mask, is_causal=True, implementation=implementation
    )


_ON_CUDA: dict[Attention, Callable[..., jax.Array]] = {"cudnn": _cuda_attention, "fa3": flash3}


def cudnn_takes(q: jax.Array) -> bool:
    """Return whether cuDNN's flash attention supports such queries."""
    ampere_or_newer = (cuda_capability() or 0) >= 8
    head_dim = q.shape[-1]
    return ampere_or_newer and q.dtype.itemsize == 2 and head_dim <= 128 and head_dim % 8 == 0


def _query_key_value(params: Params, x: jax.Array, on_gpu: bool) -> Sequence[jax.Array]:
    """Return three arrays `[..., width]`; on a GPU from separate products, to avoid a copy."""
    if not on_gpu:
        return jnp.split(_dense(params, x), 3, axis=-2)

    def part(number: int) -> jax.Array:
        return _dense({name: leaf[..., number, :] for name, leaf in params.items()}, x)

    return [part(number) for number in range(3)]


def _dense(params: Params, x: jax.Array) -> jax.Array:
    biased: jax.Array = checkpoint_name(_biased(_product(params, x), params["bias"]), _DENSE)
    return biased


def _product(params: Params, x: jax.Array) -> jax.Array:
    """Multiply `x` `[..., inputs]` by a weight `[inputs, ...]` in one product."""
    return jnp.tensordot(x, params["weight"], 1)


def _gelu(x: jax.Array) -> jax.Array:
    return jax.nn.gelu(x, approximate=True)


# Below, embeddings are looked up and biases broadcast in float32, so that the gradients, which are
# sums over all tokens, are too. In bfloat16, a token seen 4,096 times has an error of up to 1/3.


def _embedded(params: Params, tokens: jax.Array, positions: jax.Array | None = None) -> jax.Array:
    embedding, table = params["wte"]["weight"], params["wpe"]["weight"]
    places = slice(tokens.shape[1]) if positions is None else positions
    x = to_sum(embedding)[tokens] + to_sum(table)[places]
    return x.astype(embedding.dtype)


def _biased(x: jax.Array, bias: jax.Array) -> jax.Array:
    # Added in the dtype of the product, cuBLAS does it, and GELU, before it writes the product.
    return x + jnp.broadcast_to(to_sum(bias), x.shape).astype(x.dtype)


def _layer_norm(params: Params, x: jax.Array) -> jax.Array:
    wide = to_sum(x)
    mean = jnp.mean(wide, axis=-1, keepdims=True)
    variance = jnp.mean(jnp.square(wide - mean), axis=-1, keepdims=True)
    normal = (wide - mean) * lax.rsqrt(variance + EPSILON)
    return (normal * to_sum(params["weight"]) + to_sum(params["bias"])).astype(x.dtype)


def _names(prefix: str) -> Rename:
    layer = prefix + r"h.(\d+)"
    attention = stacked(r"h.attn.c_attn.\2")  # query, key and value side by side
    return {
        prefix + r"h\.\d+\.attn\.(masked_)?bias": None,  # the causal mask, in some exports
        layer + ".attn.c_attn.(weight)": rearranged(attention, "width (qkv out) -> width qkv out"),
        layer + ".attn.c_attn.(bias)": rearranged(attention, "(qkv out) -> qkv out"),
        layer + ".(.+)": stacked(r"h.\2"),
        prefix + "(wte|wpe|ln_f).(weight|bias)": r"\1.\2",
    }


GPT2_NAMES: Rename = {**_names(""), **_names("transformer."), "lm_head.weight": tied("wte.weight")}
"""The table for `rx.load_weights` and `rx.save_weights`; without a prefix when written."""


def published(params: Params) -> dict[str, np.ndarray]:
    """Return `params` under the published names, on the host."""
    return named_weights(params, GPT2_NAMES)
