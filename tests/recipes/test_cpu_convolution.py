"""The fused layer of LeNet against XLA's own, in value and in every gradient."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from support.tiers import EXHAUSTIVE, only

from replicax.recipes.cpu import convolve_relu_pool
from replicax.recipes.lenet import _convolution
from replicax.recipes.lenet import _ordinary_convolution as ordinary


def relative_difference(actual: Any, expected: Any) -> float:
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    return abs(actual - expected).max() / abs(expected).max()


def normal(seed: int, shape: tuple[int, ...], dtype: Any = jnp.float32) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, dtype)


@pytest.mark.parametrize(
    ("channels", "size", "kernel"),
    only([(2, 6, 5)], [(1, 28, 3), (20, 13, 5), (3, 7, 1), (2, 6, 5)]),
)
# In float32 XLA's own sums round differently on each processor.
@pytest.mark.parametrize(("dtype", "bound"), [("float64", 1e-13), ("float32", 2e-6)])
def test_the_layer_and_its_gradients_match_xlas(
    channels: int, size: int, kernel: int, dtype: str, bound: float
) -> None:
    def with_gradients(layer: Any) -> Any:
        of = jax.grad(lambda *arrays: (layer(*arrays) * weight).sum(), argnums=(0, 1, 2))
        return (layer(x, w, b), *of(x, w, b))

    with jax.enable_x64(dtype == "float64"):
        x = normal(0, (6, size, size + 1, channels), dtype)
        w, b = normal(1, (kernel, kernel, channels, 10), dtype), normal(3, (10,), dtype)
        weight = normal(2, ordinary(x, w, b).shape, dtype)
        pairs = zip(with_gradients(convolve_relu_pool), with_gradients(ordinary), strict=True)
    assert weight.shape == (6, (size - kernel + 1) // 2, (size - kernel + 2) // 2, 10)
    for actual, wanted in pairs:
        assert actual.dtype == dtype
        assert relative_difference(actual, wanted) < bound


def test_bfloat16_products_are_summed_in_float32() -> None:
    x, w = normal(0, (4, 13, 13, 20), jnp.bfloat16), normal(1, (5, 5, 20, 50), jnp.bfloat16)
    b = jnp.full(50, 1e3, jnp.bfloat16)  # relu passes all
    y, pullback = jax.vjp(convolve_relu_pool, x, w, b)
    gradients = pullback(jnp.ones_like(y))
    assert {a.dtype for a in (y, *gradients)} == {jnp.dtype(jnp.bfloat16)}
    wide = [each.astype(jnp.float32) for each in (x, w, b)]
    exact, exact_pullback = jax.vjp(ordinary, *wide)
    for actual, wanted in zip(gradients[:2], exact_pullback(jnp.ones_like(exact))[:2], strict=True):
        assert relative_difference(actual, wanted) < 2**-8  # one rounding of the exact sum


@EXHAUSTIVE
def test_inside_shard_map_pmap_scan_and_remat() -> None:
    x, w, b = normal(0, (8, 4, 9, 9, 3)), normal(1, (3, 3, 3, 5)), jnp.zeros(5)

    def grad(x: jax.Array) -> jax.Array:
        return jax.grad(lambda w: (_convolution(x, w, b) ** 2).sum())(w)

    expected = np.stack([jax.jit(grad)(rows) for rows in x])
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = PartitionSpec("data")
    forms = {
        "vmap": jax.jit(jax.vmap(grad)),
        "map": jax.jit(lambda x: jax.lax.map(grad, x)),
        "remat": jax.jit(lambda x: jax.lax.map(jax.checkpoint(grad), x)),
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


def test_an_accelerator_runs_the_ordinary_layer() -> None:
    x, w, b = normal(0, (4, 9, 9, 3)), normal(1, (3, 3, 3, 5)), jnp.zeros(5)
    step = jax.jit(jax.grad(lambda w: (_convolution(x, w, b) ** 2).sum()))
    text = step.trace(w).lower(lowering_platforms=("cuda",)).as_text()
    assert "stablehlo.convolution" in text
    assert "stablehlo.dot_general" not in text
    text = step.trace(w).lower(lowering_platforms=("cpu",)).as_text()
    assert "stablehlo.dot_general" in text
    assert "stablehlo.convolution" not in text
