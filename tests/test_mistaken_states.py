"""Batches and states of another kind, optimizer or model are refused in one line."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.mistakes import (
    ADAM,
    MODEL,
    ROWS,
    SGD,
    WIDE,
    init,
    loss,
    make,
    refused,
    step,
    step_and_evaluate,
    whole,
    wide,
)

from replicax.errors import DataError, StateError


@pytest.mark.parametrize("mode", ["jit", "shard_map"])
def test_a_batch_larger_than_the_first_has_its_own_mean(mode: str) -> None:
    dp = make(optimizer=optax.sgd(0.0), mode=mode)
    state = dp.init(MODEL)
    for rows in (4, 8, 6, 40):
        batch = {"x": np.resize(ROWS["x"], (rows, 3))}
        state, metrics = dp.step(state, batch)
        np.testing.assert_allclose(metrics["loss"], whole(MODEL, batch, None), rtol=1e-6)


@pytest.mark.parametrize("place", [lambda keys: keys, jax.device_get], ids=["device", "host"])
def test_random_keys_in_a_batch_are_refused_by_name(place: Any) -> None:
    rows = {**ROWS, "noise": place(jax.random.split(jax.random.key(0), 8))}
    dp = make()
    state = dp.init(MODEL)
    for call in (
        lambda: dp.step(state, rows),
        lambda: dp.step(state, jax.tree.map(jnp.asarray, rows)),
        lambda: list(dp.feed(rows, 8)),
        lambda: list(dp.feed([rows])),
        lambda: dp.evaluate(state, [rows]),
        lambda: dp.lower(MODEL, jax.eval_shape(lambda: rows)),
    ):
        said = refused(DataError, call, "jax.random.key_data")
        assert "batch['noise'] holds 8 random keys" in said


def test_keys_as_numbers_may_be_rows() -> None:
    def noisy(model: Any, batch: Any, key: Any) -> Any:
        keys = jax.random.wrap_key_data(batch["noise"])
        return loss(model, batch, key) + jax.vmap(jax.random.normal)(keys)

    rows = {**ROWS, "noise": jax.random.key_data(jax.random.split(jax.random.key(0), 8))}
    metrics = step(noisy, rows, mode="shard_map")
    np.testing.assert_allclose(metrics["loss"], noisy(MODEL, rows, None).mean(), rtol=1e-6)


def test_a_model_is_no_state() -> None:
    dp = make(mode="single")
    dp.init(MODEL)
    for call in (
        lambda: dp.step(MODEL, ROWS),
        lambda: dp.evaluate(MODEL, [ROWS]),
        lambda: dp.model(MODEL),
    ):
        refused(StateError, call, "dp.init(model)", "dict")


@pytest.mark.parametrize(
    "optimizer", [SGD, optax.sgd(0.1, momentum=0.9), optax.chain(optax.clip(1.0), ADAM)]
)
@pytest.mark.parametrize("mode", ["jit", "pmap"])
def test_a_state_of_another_optimizer_is_refused(optimizer: Any, mode: str) -> None:
    dp = make(mode=mode)
    dp.init(MODEL)
    state = make(optimizer=optimizer, mode=mode).init(MODEL)
    for call in step_and_evaluate(dp):
        refusal = functools.partial(call, state, ROWS)
        refused(StateError, refusal, "state.opt_state", "optimizer")


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ({"w": jnp.ones((3, 2))}, ["['w']", "(3, 2)", "(3,)"]),
        ({"w": jnp.ones(3), "b": jnp.ones(5)}, ["['b']", "(5,)"]),
    ],
)
def test_a_state_of_another_model_is_refused(model: Any, words: list[str]) -> None:
    dp = make()
    state, _ = dp.step(dp.init(MODEL), ROWS)
    other = init(model)
    for _ in range(2):
        refused(StateError, lambda: dp.step(other, ROWS), *words)
    assert int(dp.step(state, ROWS)[0].step) == 2


def test_a_state_with_other_values_is_its_own() -> None:
    """As target networks and schedule-free averages are set: on the host, in other dtypes."""
    dp = make(donate=False)
    state = dp.init(MODEL)
    for changed in (
        dataclasses.replace(state, params={"w": np.zeros(3)}),
        dataclasses.replace(state, params={"w": state.params["w"] / 2}),
        dataclasses.replace(state, step=3, seed=7),
    ):
        after, _ = dp.step(changed, ROWS)
        assert int(after.step) == int(changed.step) + 1


def test_only_a_step_may_be_inside_jit() -> None:
    dp = make()
    state = dp.init(MODEL)
    (batch,) = dp.feed(ROWS, 8)
    for call in (
        lambda: jax.jit(lambda rows: dp.evaluate(state, [rows]))(ROWS),
        lambda: jax.jit(lambda s: dp.evaluate(s, [ROWS]))(state),
        lambda: jax.jit(lambda s: dp.steps(s, [ROWS]))(state),
        lambda: jax.jit(lambda s: dp.model(s))(state),
    ):
        refused(StateError, call, "jax.jit")
    for after, _ in (
        jax.jit(lambda rows: dp.step(state, rows))(ROWS),
        jax.jit(lambda rows: dp.step(state, rows))(batch),
        jax.jit(dp.step)(state, ROWS),
        dp.step(state, batch),
    ):
        assert int(after.step) == 1


@pytest.mark.parametrize("mode", ["single", "jit", "shard_map", "pmap"])
def test_a_model_outlives_the_state_that_it_was_taken_from(mode: str) -> None:
    dp = make(mode=mode)
    state = dp.init(MODEL)
    model = dp.model(state)
    for _ in range(2):
        state, _ = dp.step(state, ROWS)
    np.testing.assert_array_equal(model["w"], MODEL["w"])
    assert not np.allclose(dp.model(state)["w"], model["w"])


@pytest.mark.parametrize("layout", ["replicated", "fsdp"])
def test_a_model_lies_where_its_state_does(layout: str) -> None:
    dp = make(wide, layout=layout)
    state = dp.init(WIDE)
    model = dp.model(state)
    assert model["w"].sharding.is_equivalent_to(state.params["w"].sharding, 2)
    np.testing.assert_array_equal(model["w"], WIDE["w"])


@pytest.mark.parametrize(("options", "asked"), [({}, {"copy": False}), ({"donate": False}, {})])
def test_a_model_that_needs_no_copy_is_the_state(options: Any, asked: Any) -> None:
    dp = make(mode="single", **options)
    state = dp.init(MODEL)
    assert dp.model(state, **asked)["w"] is state.params["w"]
