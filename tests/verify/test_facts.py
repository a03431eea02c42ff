"""Random numbers that do not come from the key are found in the program."""

import cProfile
import math
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from verify import zoo_recipes as zoo
from verify.warm import warm_subject

import replicax as rx
from replicax.core.jaxprs.row_counts import FROM_STEP_KEY
from replicax.core.jaxprs.row_dependence import Follow
from replicax.verify.devices_asked import devices_asked
from replicax.verify.facts import examine_subject


def draws(function: Any) -> bool:
    data = jax.random.key_data(jax.random.key(1))
    jaxpr = jax.make_jaxpr(lambda data, x: function(jax.random.wrap_key_data(data), x))(data, 1.0)
    follow = Follow((1, 1))
    follow(jaxpr, jaxpr, [FROM_STEP_KEY, None])
    return follow.draws_alone


def in_a_loop(key: jax.Array, x: Any) -> Any:
    def body(carry: Any, number: Any) -> Any:
        return carry + jax.random.normal(jax.random.fold_in(key, number)), None

    return jax.lax.scan(body, x, jnp.arange(3))[0]


def constant_in_a_loop(key: jax.Array, x: Any) -> Any:
    def body(carry: Any, number: Any) -> Any:
        return carry + jax.random.normal(jax.random.fold_in(jax.random.key(0), number)), None

    return jax.lax.scan(body, x, jnp.arange(3))[0]


@pytest.mark.parametrize(
    ("function", "found"),
    [
        (lambda key, x: x + jax.random.normal(key), False),
        (lambda key, x: x + jax.random.normal(jax.random.key(0)), True),
        (lambda key, x: x + jax.jit(jax.random.normal)(jax.random.split(key)[0]), False),
        (lambda key, x: x + jax.jit(lambda: jax.random.normal(jax.random.key(3)))(), True),
        (in_a_loop, False),
        (constant_in_a_loop, True),
        (lambda key, x: x, False),
    ],
)
def test_functions(function: Any, found: bool) -> None:
    assert draws(function) == found


@pytest.mark.parametrize(
    ("loss", "model", "found"),
    [
        (zoo.dropout, zoo.network, False),
        (zoo.constant_key, zoo.network, True),
        (zoo.nnx_loss, lambda: zoo.NNXNetwork(0.5), False),
    ],
)
def test_losses(loss: Any, model: Any, found: bool) -> None:
    dp = rx.DataParallel(loss, zoo.Entry().optimizer(), mode="single")
    assert examine_subject(warm_subject(dp, model(), zoo.data(), 1, 0)).constant_key == found


def test_a_profiler_goes_on_once_devices_were_watched() -> None:
    profiler = cProfile.Profile()
    profiler.enable()
    with devices_asked():
        pass
    math.sqrt(2)
    profiler.disable()
    assert any("sqrt" in str(entry.code) for entry in profiler.getstats())
