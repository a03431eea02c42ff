"""Schedules of what XLA compiles for eight CPU devices, against sums by hand."""

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from analysis.test_kernel_time import CHIP
from jax import lax
from support.tiers import only

import replicax as rx
from replicax.analysis.compiled import inspect
from replicax.analysis.flops import count_flops
from replicax.analysis.roofline import kernel_roofline
from replicax.analysis.schedule import read_schedule
from replicax.plan.speed import timeline

ROWS, IN, HIDDEN, LAYERS = 64, 16, 32, 3
MODEL = {
    "in": jnp.ones((IN, HIDDEN)),
    "h": jnp.ones((LAYERS, HIDDEN, HIDDEN)),
    "out": jnp.ones((HIDDEN, IN)),
}
BATCH = {"x": np.ones((ROWS, IN), np.float32)}


def loss(model: Any, batch: Any, key: Any) -> jax.Array:
    def layer(x: jax.Array, weight: jax.Array) -> tuple[jax.Array, None]:
        return jnp.tanh(x @ weight), None

    x, _ = jax.lax.scan(layer, batch["x"] @ model["in"], model["h"])
    return jnp.mean((x @ model["out"] - batch["x"]) ** 2, axis=-1)


# Forward and weight gradient of each product, and the input's gradient of all but the first.
FLOPS = 2 * ROWS * (2 * IN * HIDDEN + 3 * LAYERS * HIDDEN * HIDDEN + 3 * HIDDEN * IN)


@cache
def lowered(mode: str, accumulate: int, layout: str = "replicated") -> Any:
    dp = rx.DataParallel(loss, optax.adam(0.1), mode=mode, accumulate=accumulate, layout=layout)
    return dp.lower(MODEL, BATCH)


@cache
def compiled(mode: str, accumulate: int, layout: str = "replicated") -> Any:
    return lowered(mode, accumulate, layout).compile()


@pytest.mark.parametrize("accumulate", only([4], [1, 4]))
@pytest.mark.parametrize("mode", ["jit", "shard_map"])
def test_the_flops_are_those_of_every_other_count(mode: str, accumulate: int) -> None:
    step = compiled(mode, accumulate)
    schedule = read_schedule(step.as_text())
    assert schedule.flops * 8 == FLOPS
    assert schedule.flops == inspect(step).flops
    dp = rx.DataParallel(loss, optax.adam(0.1), mode=mode, accumulate=accumulate)
    assert count_flops(dp.trace(MODEL, BATCH).jaxpr.jaxpr, "cpu") == FLOPS
    assert schedule.unknown_calls == ()


def test_of_a_pipeline_the_ticks_that_work_count() -> None:
    """A conditional computes in 3 of 5 ticks; the code outside it runs in all."""

    def tick(carried: jax.Array, time: jax.Array) -> tuple[jax.Array, None]:
        works = lax.cond(time < 3, lambda x: jnp.tanh(x @ x), lambda x: x, carried)
        return works @ works, None

    def run(x: jax.Array) -> jax.Array:
        return lax.scan(tick, x, jnp.arange(5))[0]

    text = jax.jit(run).lower(jnp.ones((64, 64))).compile().as_text() or ""
    product = 2 * 64**3
    assert read_schedule(text).flops == (5 + 5) * product
    schedule = read_schedule(text, working={5: 3})
    assert schedule.flops == (5 + 3) * product
    assert read_schedule(text, working={4: 3}).flops == (5 + 5) * product
    seconds, _ = timeline(schedule, CHIP, "float32")
    each = sum(k.runs * kernel_roofline(k, CHIP, "float32").seconds for k in schedule.kernels)
    assert seconds == pytest.approx(each)
