"""Hardware rates for the shapes of GPT-2 124M, as a reference for its step.

Products in bfloat16 with the published vocabulary and one padded to a multiple of 128, a memory
copy, cuDNN's attention, and the sum of an embedding's gradient in bfloat16 and float32. Those of a
GPU that `replicax plan` knows are written to the table of rates that it reads.
"""

import argparse
import functools
import time
from collections.abc import Callable
from datetime import date
from typing import Any

import gpu_rates
import jax
import jax.numpy as jnp
from gpu_machine import version
from gpu_part import answer, options

from replicax.analysis.hardware import chip_of_kind

ROWS, CONTEXT, HEADS, HEAD_DIM = 32, 1024, 12, 64
WIDTH = HEADS * HEAD_DIM
TOKENS = ROWS * CONTEXT
CUDNN = ("nvidia-cudnn-cu13", "nvidia-cudnn-cu12")
PRODUCTS = {
    "query, key and value": (TOKENS, WIDTH, 3 * WIDTH),
    "MLP in": (TOKENS, WIDTH, 4 * WIDTH),
    "MLP out": (TOKENS, 4 * WIDTH, WIDTH),
    "logits of 50257": (TOKENS, WIDTH, 50257),
    "logits of 50304": (TOKENS, WIDTH, 50304),
    "8192 x 8192 x 8192": (8192, 8192, 8192),
}
"""Rows of the left matrix, the inner dimension, and columns of the right matrix."""


def measure(args: argparse.Namespace) -> dict[str, Any]:
    small = 128 if args.tiny else 1
    found = {**products(small), **copy(small), **attention(small), **scatter_add(small)}
    device = jax.devices()[0]
    known = chip_of_kind(device.device_kind)
    if not args.tiny and known is not None and known.platform == "cuda":
        cudnn = next(filter(None, map(version, CUDNN)), "unknown")
        told = device.device_kind, str(date.today()), f"jax {jax.__version__}", f"cuDNN {cudnn}"
        gpu_rates.write(known.name, gpu_rates.rates(", ".join(told), found, PRODUCTS))
    return found


def products(small: int) -> dict[str, float]:
    """Measure the TFLOP/s of each product."""
    found = {}
    for name, (rows, inner, columns) in PRODUCTS.items():
        left, right = normal(rows // small, inner // small), normal(inner // small, columns)
        flops = 2 * left.size * columns
        found[f"product, {name}, TFLOP/s"] = rate(flops, seconds(jnp.matmul, left, right))
    return found


def copy(small: int) -> dict[str, float]:
    """Measure the bandwidth of reading and writing a gigabyte."""
    array = jnp.ones(2**29 // small, jnp.bfloat16)
    taken = seconds(lambda array: array + 1, array)
    return {"copy, read and written, TB/s": round(2 * array.nbytes / taken / 1e12, 3)}


def attention(small: int) -> dict[str, float]:
    """Measure causal attention, counting half of the products: 2 forward and 5 backward."""
    rows, context = max(ROWS // small, 1), max(CONTEXT // small, 64)
    q = normal(rows, context, HEADS, HEAD_DIM)
    product = rows * HEADS * context**2 * HEAD_DIM  # 2 FLOPs each, half of them unmasked
    on_gpu = jax.default_backend() == "gpu"
    kernel = "cuDNN" if on_gpu else "no cuDNN"
    attend = functools.partial(
        jax.nn.dot_product_attention, is_causal=True, implementation="cudnn" if on_gpu else None
    )

    def both(*inputs: jax.Array) -> Any:
        attended, backward = jax.vjp(attend, *inputs)
        return backward(attended)

    return {
        f"attention, forward ({kernel}), TFLOP/s": rate(2 * product, seconds(attend, q, q, q)),
        f"attention, both ways ({kernel}), TFLOP/s": rate(7 * product, seconds(both, q, q, q)),
    }


def scatter_add(small: int) -> dict[str, float]:
    """Measure the milliseconds to add all tokens' gradients to their rows of the embedding."""
    drawn = jax.random.pareto(jax.random.key(1), 1.0, (TOKENS // small,))  # distributed like words
    tokens, gradient = drawn.astype(jnp.int32) % 50257, normal(TOKENS // small, WIDTH)
    found = {}
    for dtype in (jnp.bfloat16, jnp.float32):

        def summed(tokens: jax.Array, gradient: jax.Array, dtype: Any = dtype) -> jax.Array:
            return jnp.zeros((50257, WIDTH), dtype).at[tokens].add(gradient.astype(dtype))

        milliseconds = 1e3 * seconds(summed, tokens, gradient)
        found[f"embedding's gradient in {dtype.__name__}, ms"] = round(milliseconds, 3)
    return found


def normal(*shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(0), shape, jnp.bfloat16)


def rate(flops: float, taken: float) -> float:
    """Return the rate in TFLOP/s."""
    return round(flops / taken / 1e12, 3)


def seconds(function: Callable[..., Any], *arrays: jax.Array) -> float:
    """Return the seconds per run in the fastest of three rounds of 0.1 s each."""
    compiled = jax.jit(function)
    jax.block_until_ready(compiled(*arrays))

    def mean(runs: int) -> float:
        started = time.perf_counter()
        for _ in range(runs):
            out = compiled(*arrays)
        jax.block_until_ready(out)
        return (time.perf_counter() - started) / runs

    runs = min(max(int(0.1 / mean(1)), 1), 100)
    return min(mean(runs) for _ in range(3))


if __name__ == "__main__":
    answer(measure, options(__doc__))
