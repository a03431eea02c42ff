"""A vision transformer as a pytree: layers stacked for `scan`, one product for q, k and v."""

from typing import Any

import jax
import jax.numpy as jnp

import replicax as rx

Params = dict[str, Any]


def init(width: int, hidden: int, layers: int, heads: int, patch: int, classes: int) -> Params:
    """Return parameters of zeros, for images of 4 x 4 patches."""

    def dense(inputs: int, *outputs: int) -> Params:
        return {
            "kernel": jnp.zeros((layers, inputs, *outputs)),
            "bias": jnp.zeros((layers, *outputs)),
        }

    def norm(*stack: int) -> Params:
        return {"scale": jnp.zeros((*stack, width)), "bias": jnp.zeros((*stack, width))}

    head = width // heads
    out = {"kernel": jnp.zeros((layers, heads, head, width)), "bias": jnp.zeros((layers, width))}
    return {
        "patch": {"kernel": jnp.zeros((patch, patch, 3, width)), "bias": jnp.zeros(width)},
        "cls": jnp.zeros(width),
        "position": jnp.zeros((17, width)),
        "blocks": {
            "norm1": norm(layers),
            "qkv": dense(width, heads, 3 * head),
            "out": out,
            "norm2": norm(layers),
            "fc1": dense(width, hidden),
            "fc2": dense(hidden, width),
        },
        "norm": norm(),
        "head": {"kernel": jnp.zeros((width, classes)), "bias": jnp.zeros(classes)},
    }


def normed(params: Params, x: jax.Array) -> jax.Array:
    centred = x - x.mean(-1, keepdims=True)
    deviation = jnp.sqrt((centred**2).mean(-1, keepdims=True) + 1e-12)
    return centred / deviation * params["scale"] + params["bias"]


def logits(params: Params, images: jax.Array) -> jax.Array:
    """Return `[rows, classes]` of images `[rows, size, size, 3]`."""
    kernel = params["patch"]["kernel"]
    strides = kernel.shape[:2]
    dims = ("NHWC", "HWIO", "NHWC")
    x = jax.lax.conv_general_dilated(images, kernel, strides, "VALID", dimension_numbers=dims)
    x = (x + params["patch"]["bias"]).reshape(len(images), -1, kernel.shape[-1])
    cls = jnp.broadcast_to(params["cls"], (len(images), 1, x.shape[-1]))
    x = jnp.concatenate([cls, x], 1) + params["position"]

    def block(x: jax.Array, p: Params) -> tuple[jax.Array, None]:
        qkv = jnp.einsum("btw,whd->bthd", normed(p["norm1"], x), p["qkv"]["kernel"])
        attended = jax.nn.dot_product_attention(*jnp.split(qkv + p["qkv"]["bias"], 3, -1))
        x = x + jnp.einsum("bthd,hdw->btw", attended, p["out"]["kernel"]) + p["out"]["bias"]
        hidden = normed(p["norm2"], x) @ p["fc1"]["kernel"] + p["fc1"]["bias"]
        hidden = jax.nn.gelu(hidden, approximate=False)
        return x + hidden @ p["fc2"]["kernel"] + p["fc2"]["bias"], None

    x, _ = jax.lax.scan(block, x, params["blocks"])
    return normed(params["norm"], x)[:, 0] @ params["head"]["kernel"] + params["head"]["bias"]


weights = rx.weights
LAYER = r"vit.encoder.layer.(\d+)."


def stacked(leaf: str) -> Any:
    return weights.stacked(f"blocks.{leaf}")


NAMES = {
    "vit.embeddings.cls_token": weights.rearranged("cls", "1 1 width -> width"),
    "vit.embeddings.position_embeddings": weights.rearranged(
        "position", "1 token width -> token width"
    ),
    "vit.embeddings.patch_embeddings.projection.weight": weights.transposed(
        "patch.kernel", (2, 3, 1, 0)
    ),
    "vit.embeddings.patch_embeddings.projection.bias": "patch.bias",
    **{
        f"{LAYER}attention.attention.{name}.{kind}": weights.rearranged(
            weights.part(stacked(f"qkv.{leaf}"), number, (1, 1, 1)), pattern
        )
        for number, name in enumerate(("query", "key", "value"))
        for kind, leaf, pattern in (
            ("weight", "kernel", "(heads dim) width -> width heads dim"),
            ("bias", "bias", "(heads dim) -> heads dim"),
        )
    },
    f"{LAYER}attention.output.dense.weight": weights.rearranged(
        stacked("out.kernel"), "width (heads dim) -> heads dim width"
    ),
    f"{LAYER}attention.output.dense.bias": stacked("out.bias"),
    **{
        f"{LAYER}{name}.{kind}": place
        for name, leaf in {"intermediate.dense": "fc1", "output.dense": "fc2"}.items()
        for kind, place in {
            "weight": weights.transposed(stacked(f"{leaf}.kernel")),
            "bias": stacked(f"{leaf}.bias"),
        }.items()
    },
    **{
        f"{prefix}.{kind}": stacked(f"{leaf}.{part}") if "(" in prefix else f"{leaf}.{part}"
        for prefix, leaf in {
            f"{LAYER}layernorm_before": "norm1",
            f"{LAYER}layernorm_after": "norm2",
            "vit.layernorm": "norm",
        }.items()
        for kind, part in (("weight", "scale"), ("bias", "bias"))
    },
    "classifier.weight": weights.transposed("head.kernel"),
    "classifier.bias": "head.bias",
}
