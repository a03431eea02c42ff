"""The CNN's convolution against `lax`'s own convolution and gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from replicax.analysis.hlo import instructions
from replicax.recipes.cpu import conv_general_dilated

KEY = jax.random.key(0)


def same_conv2d(x: jax.Array, kernel: jax.Array) -> jax.Array:
    return conv_general_dilated(x, kernel, (1, 1), "SAME")


def reference(x: jax.Array, kernel: jax.Array) -> jax.Array:
    return lax.conv_general_dilated(
        x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


@pytest.mark.parametrize("size", [(1, 1), (3, 3), (5, 3)])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_gradients_are_those_of_lax(size: tuple[int, int], dtype: jnp.dtype) -> None:
    x = jax.random.normal(KEY, (4, 9, 8, 3)).astype(dtype)
    kernel = jax.random.normal(KEY, (*size, 3, 5)).astype(dtype)
    weights = jax.random.normal(KEY, (4, 9, 8, 5)).astype(dtype)
    found, expected = (
        jax.value_and_grad(lambda *a, f=f: jnp.sum(f(*a) * weights), (0, 1))(x, kernel)  # type: ignore[misc]
        for f in (same_conv2d, reference)
    )
    eps = float(jnp.finfo(dtype).eps)
    for mine, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        scale = float(jnp.abs(theirs).max())
        np.testing.assert_allclose(
            mine.astype(jnp.float32), theirs.astype(jnp.float32), atol=16 * eps * scale
        )


def test_in_a_loop_all_convolutions_have_the_order_that_is_fast() -> None:
    def gradients(x: jax.Array, kernel: jax.Array, turns: jax.Array) -> jax.Array:
        def turn(number: jax.Array, total: jax.Array) -> jax.Array:
            loss = lambda kernel: jnp.sum(same_conv2d(same_conv2d(x + number, kernel), kernel) ** 2)  # noqa: E731
            return total + jax.grad(loss)(kernel)

        return lax.fori_loop(0, turns, turn, jnp.zeros_like(kernel))

    shapes = (jnp.ones((4, 8, 8, 3)), jnp.ones((3, 3, 3, 3)), jnp.int32(2))
    text = jax.jit(gradients).lower(*shapes).compile().as_text()
    found = [i.attributes for i in instructions(text) if i.opcode == "convolution"]
    assert len(found) >= 4
    assert all("dim_labels=b01f_01io->b01f" in attributes for attributes in found)
