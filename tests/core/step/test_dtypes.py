"""Parameters of several dtypes: each keeps its dtype, with its moments, as in plain JAX."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.tiers import only
from support.training import by_hand, losses, normals

import replicax as rx

OPTIMIZERS = {
    "adam": optax.adam(0.05),
    "adamw": optax.adamw(0.05),
    "momentum": optax.sgd(0.05, momentum=0.9),
}
CASES = [
    *[("bfloat16", name, mode) for name in OPTIMIZERS for mode in ("single", "jit", "shard_map")],
    *[("bfloat16", "adam", mode) for mode in ("pmap", "exact")],
    *[(low, "adam", mode) for low in ("float16", "complex64") for mode in ("jit", "shard_map")],
]
STEPS = 3
ROWS = {"x": normals(0)(16, 4), "y": normals(1)(16, 2)}


def model(low: str) -> dict[str, jax.Array]:
    key = jax.random.key(0)
    return {
        "hidden": jax.random.normal(key, (4, 8)) / 2,
        "low": jnp.ones(8, low),
        "out": jax.random.normal(key, (8, 2)) / 3,
    }


def loss(model: Any, batch: Any, key: Any) -> Any:
    hidden = jnp.tanh(batch["x"] @ model["hidden"]) * model["low"].astype(jnp.float32)
    return jnp.square(hidden @ model["out"] - batch["y"]).mean(1)


def complex_loss(model: Any, batch: Any, key: Any) -> Any:
    hidden = (batch["x"] @ model["hidden"]) * model["low"]
    return jnp.square(jnp.abs(hidden @ model["out"] - batch["y"])).mean(1)


def dtypes(tree: Any) -> list[Any]:
    return [leaf.dtype for leaf in jax.tree.leaves(tree)]


def check_params(state: rx.TrainState, params: Any, low: str) -> None:
    # At most one unit in the last place of the low precision.
    tolerance = {"bfloat16": 2**-7, "float16": 2**-10, "complex64": 1e-5}[low]
    for found, wanted in zip(jax.tree.leaves(state.params), jax.tree.leaves(params), strict=True):
        np.testing.assert_allclose(
            np.asarray(found, np.complex64), np.asarray(wanted, np.complex64), rtol=tolerance
        )


KEPT = [
    ("bfloat16", "adam", "jit"),
    ("bfloat16", "adam", "shard_map"),
    ("float16", "adam", "jit"),
    ("complex64", "adam", "shard_map"),
]


@pytest.mark.parametrize(("low", "optimizer", "mode"), only(KEPT, CASES))
def test_a_leaf_of_another_dtype_trains_as_in_plain_jax(
    low: str, optimizer: str, mode: str
) -> None:
    function = complex_loss if low == "complex64" else loss
    dp = rx.DataParallel(function, OPTIMIZERS[optimizer], mode=mode)
    state = dp.init(model(low))
    before = dtypes(state)
    (batch,) = dp.feed(ROWS, 16)
    found = []
    for _ in range(STEPS):
        state, metrics = dp.step(state, batch)
        assert dtypes(state) == before
        found.append(float(metrics["loss"]))
    params, expected = by_hand(function, OPTIMIZERS[optimizer], model(low), [ROWS] * STEPS)
    np.testing.assert_allclose(found, losses(expected), rtol=1e-5)
    check_params(state, params, low)
    assert dp.program(state).step.cache_size() == 1


@pytest.mark.parametrize("mode", ["jit", "shard_map"])
def test_a_guarded_run_trains_it_too(mode: str) -> None:
    """`fit` chooses between the states before and after a step, which must be of one dtype."""
    dp = rx.DataParallel(loss, OPTIMIZERS["adam"], mode=mode)
    state = dp.init(model("bfloat16"))
    before = dtypes(state)
    found = rx.fit(dp, state, ROWS, batch_size=16, steps=STEPS, shuffle=False, progress=False)
    assert dtypes(found.state) == before
    params, _ = by_hand(loss, OPTIMIZERS["adam"], model("bfloat16"), [ROWS] * STEPS)
    check_params(found.state, params, "bfloat16")
