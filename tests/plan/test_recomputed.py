"""FLOPs that a step computes again, and the loss that computes none again."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import replicax as rx
from replicax.plan.steps import StepCache
from replicax.plan.target import parse_target

LAYERS, WIDTH = 5, 16
MODEL = {"h": jnp.ones((LAYERS, WIDTH, WIDTH)), "out": jnp.ones(WIDTH)}
BATCH = {"x": np.ones((8, WIDTH), np.float32)}


def loss(policy: Any) -> Any:
    """A loss of layers in a scan, each in `jax.checkpoint` with a policy, or none."""

    def rows(model: Any, batch: Any, key: Any) -> jax.Array:
        def layer(x: jax.Array, weight: jax.Array) -> tuple[jax.Array, None]:
            return jnp.tanh(x @ weight), None

        kept = layer if policy is None else jax.checkpoint(layer, policy=policy, prevent_cse=False)
        hidden, _ = jax.lax.scan(kept, batch["x"], model["h"])
        return hidden @ model["out"]

    return rows


def steps_of(loss: Any) -> tuple[StepCache, rx.DataParallel]:
    dp = rx.DataParallel(loss, optax.sgd(0.1), mode="single")
    return StepCache(MODEL, BATCH, parse_target("h100:1"), None, lambda text: None), dp


@pytest.mark.parametrize(
    ("policy", "again"),
    [
        (None, 0),
        (jax.checkpoint_policies.dots_saveable, 0),
        (jax.checkpoint_policies.nothing_saveable, LAYERS),
    ],
)
def test_the_share_is_that_of_products_computed_twice(policy: Any, again: int) -> None:
    steps, dp = steps_of(loss(policy))
    one = 2 * 8 * WIDTH**2
    last = 2 * 8 * WIDTH
    # Forward, and two products backward: of the last layer's input and weight, too.
    flops = 3 * LAYERS * one + 3 * last + again * one
    assert steps.recomputed_share(dp, 8) == pytest.approx(again * one / flops, rel=0.02)


def test_a_custom_step_with_recomputation_does_not_tell() -> None:
    policy = jax.checkpoint_policies.nothing_saveable

    def step(state: Any, batch: Any, key: Any) -> Any:
        found, gradient = rx.value_and_grad(loss(policy))(state, batch, key)
        return jax.tree.map(lambda p, g: p - 0.1 * g, state, gradient), found

    dp = rx.DataParallel(step=step, mode="single")
    steps = StepCache(MODEL, BATCH, parse_target("h100:1"), None, lambda text: None)
    assert steps.recomputed_share(dp, 8) is None
