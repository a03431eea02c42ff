from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from jax import lax
from support.tiers import only

import replicax as rx
from replicax.analysis.compiled import inspect
from replicax.analysis.flops import count_flops

SQUARE = jnp.ones((8, 8))
ONE = 2 * 8**3


def flops(function: Any, *arguments: Any, platform: str = "tpu") -> int:
    return count_flops(jax.jit(function).trace(*arguments).jaxpr.jaxpr, platform)


def test_a_product_counts_two_for_each_multiplication() -> None:
    assert flops(jnp.matmul, jnp.ones((3, 5)), jnp.ones((5, 7))) == 2 * 3 * 5 * 7
    batched = flops(lambda x: jnp.einsum("bij,bkj->bik", x, x), jnp.ones((4, 3, 5)))
    assert batched == 2 * 4 * 3 * 3 * 5


def test_a_convolution_counts_the_kernel_for_each_output() -> None:
    image, kernel = jnp.ones((2, 3, 9, 9)), jnp.ones((4, 3, 2, 2))
    assert flops(lambda x, k: lax.conv(x, k, (1, 1), "VALID"), image, kernel) == (
        2 * (2 * 4 * 8 * 8) * (3 * 2 * 2)
    )


def test_of_branches_the_largest_or_the_platforms_own_counts() -> None:
    def data_decides(x: jax.Array) -> jax.Array:
        return lax.cond(x[0, 0] > 0, lambda y: y @ y, lambda y: y @ y @ y, x)

    def platform_decides(x: jax.Array) -> jax.Array:
        return lax.platform_dependent(
            x, cpu=lambda y: y @ y, cuda=lambda y: y, default=lambda y: y @ y @ y
        )

    assert flops(data_decides, SQUARE) == 2 * ONE
    assert flops(platform_decides, SQUARE, platform="cpu") == ONE
    assert flops(platform_decides, SQUARE, platform="cuda") == 2 * ONE


@pytest.mark.parametrize("mode", ["single", "jit", "shard_map", "pmap"])
@pytest.mark.parametrize("accumulate", only([2], [1, 2]))
def test_every_mode_asks_for_the_same_and_a_cpu_runs_it(mode: str, accumulate: int) -> None:
    mesh = rx.make_mesh(1 if mode == "single" else 4)

    def loss(model: Any, batch: Any, key: Any) -> jax.Array:
        return jnp.sum(jnp.tanh(batch @ model["in"]) @ model["out"], axis=-1) ** 2

    dp = rx.DataParallel(loss, optax.sgd(0.1), mesh=mesh, mode=mode, accumulate=accumulate)
    model = {"in": jnp.ones((3, 5)), "out": jnp.ones((5, 2))}
    traced = dp.trace(model, jnp.ones((16, 3)))
    forward = 2 * 16 * (3 * 5 + 5 * 2)
    backward = 2 * 16 * (3 * 5 + 2 * 5 * 2)  # no gradient of the batch
    assert count_flops(traced.jaxpr.jaxpr, "cpu") == forward + backward
    assert inspect(traced.lower().compile()).flops * mesh.devices.size == forward + backward
