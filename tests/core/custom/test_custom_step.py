"""A custom step in every mode, compared with the built-in step of a loss and an optimizer."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support import training
from support.custom_step import (
    BATCH,
    ROWS,
    State,
    loss,
    model,
    of_state,
    optimizer,
    parallel,
    rows,
    state,
    step,
    trained,
)
from support.resumable import bits
from support.tiers import only
from support.training import assert_near

import replicax as rx
from replicax.train.guarded import NOT_FINITE, guarded

PLACES = [("single", 1), ("jit", 4), ("shard_map", 2), ("shard_map", 4), ("pmap", 4)]
places = pytest.mark.parametrize(("mode", "devices"), only([("shard_map", 4)], PLACES))


@places
@pytest.mark.parametrize("settings", [{}, {"accumulate": 2}])
def test_it_equals_the_built_in_step(mode: str, devices: int, settings: dict[str, Any]) -> None:
    custom, mine = trained(parallel(mode=mode, devices=devices, **settings), state())
    built_in = training.parallel(loss, optimizer, mode=mode, devices=devices, **settings)
    other, theirs = trained(built_in, model())
    for name in ("loss", "size"):
        np.testing.assert_allclose([m[name] for m in mine], [t[name] for t in theirs], rtol=1e-6)
    np.testing.assert_allclose(mine[1]["mean"], rows()["y"][BATCH:].mean(), rtol=1e-6)
    assert int(custom.params["done"]) == 2
    assert_near(custom.params["model"], other.params, atol=1e-7)


@pytest.mark.parametrize(
    "kept", only([{"layout": "fsdp"}], [{"layout": "fsdp"}, {"precision": "bfloat16"}])
)
def test_layouts_and_precisions(kept: dict[str, Any]) -> None:
    built_in = rx.DataParallel(loss, optimizer, **kept)
    _, theirs = trained(built_in, model())
    custom, mine = trained(parallel(mode="jit", devices=8, **kept), state())
    np.testing.assert_allclose([m["loss"] for m in mine], [t["loss"] for t in theirs], rtol=1e-5)
    split = custom.params["model"]["w"].sharding.is_fully_replicated
    assert split == (kept.get("layout") != "fsdp")


@pytest.mark.promise("exact.custom-steps")
def test_exact_has_the_same_bits_on_any_devices() -> None:
    found = [
        trained(parallel(mode="exact", devices=devices, micro_shards=8), state())
        for devices in (1, 2, 8)
    ]
    assert bits(found[0][0]) == bits(found[1][0]) == bits(found[2][0])
    assert found[0][1] == found[1][1] == found[2][1]


def test_outside_of_a_step_the_batch_is_the_global_one() -> None:
    batch = rows()
    means, gradient = rx.value_and_grad(loss)(model(), batch)
    value, wanted = jax.value_and_grad(lambda m: jnp.mean(loss(m, batch, None)[0]))(model())
    np.testing.assert_allclose(means["loss"], value, rtol=1e-6)
    assert_near(gradient, wanted, atol=1e-7)
    y = batch["y"]  # a batch may be one array
    means, slope = rx.value_and_grad(lambda m, y, key: (y[:, 0] - m) ** 2)(jnp.zeros(()), y)
    np.testing.assert_allclose(means["loss"], (y**2).mean(), rtol=1e-6)
    np.testing.assert_allclose(slope, -2 * y.mean(), rtol=1e-5)
    np.testing.assert_allclose(rx.mean(jnp.asarray(y)), y.mean(), rtol=1e-6)
    weights = np.arange(ROWS, dtype=np.float32)
    found = rx.mean(rx.Weighted(jnp.asarray(y), jnp.asarray(weights)))
    np.testing.assert_allclose(found, np.average(y[:, 0], weights=weights), rtol=1e-5)


# Loops, branches, several losses, and `rx` functions inside the step.


def many(state: State, batch: Any, key: Any) -> tuple[State, Any]:
    """Two updates in a loop, one in every other step, and a mean of gathered rows."""

    def update(carry: Any, _: Any) -> Any:
        model, moments = carry
        means, gradient = rx.value_and_grad(loss)(model, batch, key)
        updates, moments = optimizer.update(gradient, moments, model)
        return (optax.apply_updates(model, updates), moments), means

    begin = state["model"], state["moments"]
    (model, moments), means = jax.lax.scan(update, begin, None, length=2)
    even = rx.step_number() % 2 == 0
    (model, moments), _ = jax.lax.cond(
        even,
        lambda c: update(c, None),
        lambda c: (c, jax.tree.map(lambda m: m[-1], means)),
        (model, moments),
    )
    x, real = rx.gather((batch["x"], rx.row_weights(batch["x"])))
    center = jnp.sum(x * real[:, None], 0) / jnp.sum(real)
    after = {"model": model, "moments": moments, "center": state["center"] * 0.9 + center * 0.1}
    return after, {"loss": means["loss"][0], "second": means["loss"][1]}


@places
def test_loops_branches_and_gathered_rows(mode: str, devices: int) -> None:
    begin = {"model": model(), "moments": optimizer.init(model()), "center": jnp.zeros(4)}
    wanted, told = trained(parallel(many, "single", 1), begin)
    found, mine = trained(parallel(many, mode, devices), begin)
    assert told[0]["second"] < told[0]["loss"]
    assert int(found.params["moments"][0].count) == 5
    for one, other in zip(mine, told, strict=True):
        assert one == pytest.approx(other, rel=1e-6)
    batches = [rows()["x"][:BATCH].mean(0), rows()["x"][BATCH:].mean(0)]
    np.testing.assert_allclose(
        found.params["center"], 0.09 * batches[0] + 0.1 * batches[1], atol=1e-6
    )
    assert_near(found.params, wanted.params)


# Evaluation, bad steps and resumed runs.


def test_evaluate_takes_any_loss() -> None:
    dp = parallel()
    at = dp.init(state())
    batches = lambda dp=dp: dp.feed(rows(), BATCH)  # noqa: E731
    error = np.asarray(loss(model(), rows(), None)[0])
    found = dp.evaluate(at, batches(), loss=of_state)
    assert found["loss"] == pytest.approx(error.mean(), rel=1e-6)
    assert found["rows"] == ROWS
    assert parallel(loss=of_state).evaluate is not None
    with pytest.raises(rx.errors.ConfigError, match=r"evaluate\(state, batches, .*=loss"):
        dp.evaluate(at, batches())
    other = rx.DataParallel(of_state, step=step)
    assert other.evaluate(other.init(state()), batches(other)) == pytest.approx(found)
    third = dp.evaluate(at, batches(), loss=lambda s, b, k: b["y"])
    assert third["loss"] == pytest.approx(rows()["y"].mean(), rel=1e-5)


def test_a_state_that_is_finite_no_more_is_bad_too() -> None:
    """Its loss is finite; values that were infinite before may stay so."""
    begin = {**state(), "best": jnp.float32(jnp.inf)}

    def step(state: State, batch: Any, key: Any) -> tuple[State, Any]:
        wrong = jnp.where(rx.step_number() == 1, jnp.inf, 0.0)
        model = jax.tree.map(lambda leaf: leaf + wrong, state["model"])
        return {**state, "model": model}, {"loss": rx.mean(batch["y"][:, 0])}

    dp = parallel(step, donate=False)
    first = dp.init(begin)
    safe, batch = guarded(dp, first), {name: leaf[:BATCH] for name, leaf in rows().items()}
    second, good = safe.step(first, batch)
    third, bad = safe.step(second, batch)
    assert [bool(each[NOT_FINITE]) for each in (good, bad)] == [False, True]
    assert bits(third.params) == bits(second.params)
