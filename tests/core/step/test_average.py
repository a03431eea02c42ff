"""The moving average of the parameters, in every mode and layout."""

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec
from support.tiers import EXHAUSTIVE, only
from support.training import assert_near, normals, train

import replicax as rx

DECAY, ROWS, STEPS = 0.8, 16, 5
draw = normals(0)
MODEL = {"w": draw(8, 4), "b": draw(4)}
DATA = {"x": draw(ROWS, 8), "y": draw(ROWS, 4)}
AVERAGED = rx.Evaluation(DATA, ema=True)
CASES = [
    *({"mode": mode} for mode in ("single", "jit", "shard_map", "pmap", "exact")),
    {"layout": "zero1"},
    {"layout": "fsdp"},
    {"layout": [("w", PartitionSpec("data")), ("", PartitionSpec())]},
    {"mode": "shard_map", "layout": "zero1"},
    {"mode": "shard_map", "layout": "fsdp"},
    {"mode": "exact", "layout": "zero1"},
]


def loss(model: Any, batch: Any, key: Any) -> Any:
    return jnp.mean((jnp.tanh(batch["x"] @ model["w"] + model["b"]) - batch["y"]) ** 2, axis=1)


@cache
def by_hand() -> tuple[Any, Any]:
    """Return the parameters and their average in plain JAX."""
    params = average = jax.tree.map(jnp.asarray, MODEL)
    state = (optimizer := optax.adam(0.1)).init(params)
    for _ in range(STEPS):
        gradient = jax.grad(lambda params: jnp.mean(loss(params, DATA, None)))(params)
        updates, state = optimizer.update(gradient, state, params)
        params = optax.apply_updates(params, updates)
        average = jax.tree.map(lambda old, new: DECAY * old + (1 - DECAY) * new, average, params)
    return params, average


def trained(model: Any = MODEL, optimizer: Any = None, **arguments: Any) -> tuple[Any, Any]:
    dp = rx.DataParallel(loss, optimizer or optax.adam(0.1), ema=DECAY, **arguments)
    return dp, train(dp, model, [DATA] * STEPS)[0]


@pytest.mark.parametrize("arguments", only([CASES[2], CASES[5], CASES[-2]], CASES), ids=str)
def test_the_average_is_what_plain_jax_computes(arguments: Any) -> None:
    dp, state = trained(**arguments)
    params, average = by_hand()
    assert_near(dp.model(state), params, rtol=2e-5)
    assert_near(dp.model(state, ema=True), average, rtol=2e-5)
    expected = float(jnp.mean(loss(average, DATA, None)))
    assert dp.evaluate(state, [DATA], ema=True)["loss"] == pytest.approx(expected, rel=1e-5)
    state, _ = dp.step(state, DATA)  # nothing of it was consumed


def test_an_average_of_coarse_parameters_is_kept_in_float32() -> None:
    dp, state = trained(jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.bfloat16), MODEL))
    assert {leaf.dtype for leaf in jax.tree.leaves(state.opt_state.average)} == {
        jnp.dtype("float32")
    }
    model = dp.model(state, ema=True)
    assert {leaf.dtype for leaf in jax.tree.leaves(model)} == {jnp.dtype("bfloat16")}


def test_it_costs_the_bytes_of_the_parameters_and_no_communication() -> None:
    def compiled(**arguments: Any) -> tuple[int, str]:
        dp = rx.DataParallel(loss, optax.adam(0.1), mode="shard_map", **arguments)
        found = dp.lower(MODEL, DATA).compile()
        return found.memory_analysis().argument_size_in_bytes, found.as_text()

    (with_it, text), (without, plain) = compiled(ema=DECAY), compiled()
    assert with_it - without == 4 * (8 * 4 + 4)
    assert text.count("all-reduce(") == plain.count("all-reduce(") == 1


@pytest.mark.parametrize(
    "optimizer",
    [optax.adamw(0.1), optax.contrib.reduce_on_plateau(), optax.MultiSteps(optax.sgd(0.1), 2)],
)
def test_the_optimizer_does_what_it_did(optimizer: Any) -> None:
    dp, state = trained(optimizer=optimizer)
    plain = rx.DataParallel(loss, optimizer)
    other, _ = train(plain, MODEL, [DATA] * STEPS)
    jax.tree.map(np.testing.assert_array_equal, dp.model(state), plain.model(other))


def test_a_skipped_step_leaves_the_average() -> None:
    dp, state = trained()
    before = dp.model(state, ema=True)
    bad = {**DATA, "x": np.full_like(DATA["x"], np.nan)}
    guarded = rx.fit(dp, state, bad, batch_size=ROWS, steps=1, progress=False).state
    jax.tree.map(np.testing.assert_array_equal, before, dp.model(guarded, ema=True))


@EXHAUSTIVE
def test_verify_takes_it() -> None:
    dp = rx.DataParallel(loss, optax.adam(0.1), ema=DECAY, mode="shard_map")
    assert rx.verify(dp, MODEL, {name: np.tile(leaf, (4, 1)) for name, leaf in DATA.items()}).ok


@pytest.mark.parametrize("decay", [0, 1, -0.1, 1.5, float("nan"), "0.9"])
def test_another_decay_is_refused(decay: Any) -> None:
    with pytest.raises(rx.errors.ConfigError, match="ema="):
        rx.DataParallel(loss, optax.sgd(0.1), ema=decay)


def test_without_one_the_state_has_none() -> None:
    dp = rx.DataParallel(loss, optax.sgd(0.1))
    state = dp.init(MODEL)
    for ask in (
        lambda: dp.model(state, ema=True),
        lambda: dp.evaluate(state, [DATA], ema=True),
        lambda: rx.fit(
            dp, state, DATA, batch_size=8, steps=1, eval_source=AVERAGED, progress=False
        ),
    ):
        with pytest.raises(rx.errors.ConfigError, match=r"no average\b.*ema=0\.999\)"):
            ask()
    assert int(state.step) == 0
