"""The matrix-product convolution against XLA's own, in value and in every gradient."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec
from support.tiers import EXHAUSTIVE, only

from replicax.recipes.convolution import average_pool, conv2d

CHWN = ("CHWN", "HWIO", "CHWN")


def relative_difference(actual: Any, expected: Any) -> float:
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    return abs(actual - expected).max() / abs(expected).max()


def normal(seed: int, shape: tuple[int, ...], dtype: Any = jnp.float32) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, dtype)


def xla_conv(x: jax.Array, kernel: jax.Array) -> jax.Array:
    return lax.conv_general_dilated(x, kernel, (1, 1), "VALID", dimension_numbers=CHWN)


@pytest.mark.parametrize(
    ("channels", "size", "kernel"),
    only([(2, 5, 5)], [(1, 28, 3), (20, 12, 5), (3, 7, 1), (2, 5, 5)]),
)
def test_conv2d_and_its_gradients_match_lax(channels: int, size: int, kernel: int) -> None:
    x = normal(0, (channels, size, size + 1, 6))
    w = normal(1, (kernel, kernel, channels, 10))
    weight = normal(2, xla_conv(x, w).shape)

    def gradients(conv: Any) -> Any:
        return jax.grad(lambda x, w: (conv(x, w) * weight).sum(), argnums=(0, 1))(x, w)

    assert conv2d(x, w).dtype == jnp.float32
    assert relative_difference(conv2d(x, w), xla_conv(x, w)) < 1e-6
    for actual, wanted in zip(gradients(conv2d), gradients(xla_conv), strict=True):
        assert relative_difference(actual, wanted) < 1e-6


def test_conv2d_sums_bfloat16_products_in_float32() -> None:
    x, w = normal(0, (20, 12, 12, 4), jnp.bfloat16), normal(1, (5, 5, 20, 50), jnp.bfloat16)
    exact = xla_conv(x.astype(jnp.float32), w.astype(jnp.float32))
    y, pullback = jax.vjp(conv2d, x, w)
    gradients = pullback(jnp.ones_like(y))
    assert [a.dtype for a in (y, *gradients)] == [jnp.bfloat16] * 3
    assert relative_difference(y, exact) < 2**-8  # one rounding of the exact sum
    _, exact_pullback = jax.vjp(xla_conv, x.astype(jnp.float32), w.astype(jnp.float32))
    for actual, wanted in zip(gradients, exact_pullback(jnp.ones_like(exact)), strict=True):
        assert relative_difference(actual, wanted) < 2**-8


def test_average_pool_drops_the_incomplete_window() -> None:
    x = normal(0, (3, 9, 8, 5))
    window = lax.reduce_window(x, 0.0, lax.add, (1, 2, 2, 1), (1, 2, 2, 1), "VALID") / 4
    assert average_pool(x, 2).shape == (3, 4, 4, 5)
    assert relative_difference(average_pool(x, 2), window) < 1e-6
    assert average_pool(x, 3).shape == (3, 3, 2, 5)


def test_the_gradient_of_the_images_is_not_computed() -> None:
    kernel = normal(0, (3, 3, 1, 20))
    images = normal(1, (1, 28, 28, 8))

    def flops(argnums: Any) -> float:
        grad = jax.grad(lambda x, w: (conv2d(x, w) ** 2).sum(), argnums)
        return jax.jit(grad).lower(images, kernel).compile().cost_analysis()["flops"]

    assert flops(1) < 0.75 * flops((0, 1))


@EXHAUSTIVE
def test_conv2d_inside_shard_map_pmap_scan_and_remat() -> None:
    x, w = normal(0, (8, 3, 9, 9, 4)), normal(1, (3, 3, 3, 5))

    def grad(x: jax.Array) -> jax.Array:
        return jax.grad(lambda w: (conv2d(x, w) ** 2).sum())(w)

    expected = np.stack([jax.jit(grad)(rows) for rows in x])
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = PartitionSpec("data")
    forms = {
        "vmap": jax.jit(jax.vmap(grad)),
        "map": jax.jit(lambda x: lax.map(grad, x)),
        "remat": jax.jit(lambda x: lax.map(jax.checkpoint(grad), x)),
        "pmap": jax.pmap(grad),
        "shard_map": jax.jit(
            jax.shard_map(
                lambda x: grad(x[0])[None],
                mesh=mesh,
                in_specs=spec,
                out_specs=spec,
                check_vma=False,
            )
        ),
    }
    for name, form in forms.items():
        assert relative_difference(form(x), expected) < 1e-6, name


def test_the_accelerator_branch_lowers_to_a_convolution() -> None:
    x, w = normal(0, (3, 9, 9, 4)), normal(1, (3, 3, 3, 5))
    step = jax.jit(jax.grad(lambda w: (conv2d(x, w) ** 2).sum()))
    text = step.trace(w).lower(lowering_platforms=("cuda",)).as_text()
    assert "stablehlo.convolution" in text
    assert "stablehlo.dot_general" not in text
    text = step.trace(w).lower(lowering_platforms=("cpu",)).as_text()
    assert "stablehlo.dot_general" in text
    assert "stablehlo.convolution" not in text
