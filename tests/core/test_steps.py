"""A step inside another program, and several steps in one call, are the step."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from support.training import normals, parallel

import replicax as rx
from replicax.core.data.share import Share
from replicax.core.placement.mesh import by_rows

ROWS, BATCH = 90, 32
ONE_PROGRAM = ["single", "jit", "shard_map", "pmap"]
draw = normals(0)
SOURCE = {"x": draw(ROWS, 3), "y": draw(ROWS)}
STACK = {name: leaf[:64].reshape(2, 32, *leaf.shape[1:]) for name, leaf in SOURCE.items()}
MODEL = {"w": np.ones(3, np.float32)}


def loss(model: Any, batch: Any, key: Any) -> Any:
    noise = jax.random.normal(key, batch["y"].shape) if key is not None else 0.0
    error = batch["x"] @ model["w"] - batch["y"] + 0.0 * noise
    return error**2, {"size": jnp.abs(error)}


@functools.cache
def made(mode: str, devices: int = 4, **settings: Any) -> tuple[rx.DataParallel, rx.TrainState]:
    given = {} if "step" in settings else {"loss": loss, "optimizer": optax.adam(0.1)}
    dp = parallel(mode=mode, devices=devices, donate=False, **{**given, **settings})
    return dp, dp.init(MODEL)


def centred(model: Any, batch: Any, key: Any) -> Any:
    """A loss of rows that depend on one another."""
    error = batch["x"] @ model["w"]
    return (error - jnp.mean(error)) ** 2


def one_by_one(dp: rx.DataParallel, state: rx.TrainState, batches: Any) -> tuple[Any, Any]:
    told = []
    for batch in batches:
        state, metrics = dp.step(state, batch)
        told.append({name: float(value) for name, value in metrics.items()})
    return state, {name: [each[name] for each in told] for name in told[0]}


def slices(stack: Any) -> list[Any]:
    return [jax.tree.map(lambda leaf, n=n: leaf[n], stack) for n in range(2)]


def assert_alike(found: tuple[Any, Any], wanted: tuple[Any, Any], bound: float) -> None:
    (state, metrics), (expected, figures) = found, wanted
    for name, values in figures.items():
        np.testing.assert_allclose(metrics[name], values, rtol=bound)
    np.testing.assert_allclose(state.params["w"], expected.params["w"], rtol=bound)
    assert int(state.step) == int(expected.step)


def test_the_rows_of_several_steps_are_placed_under_any_setting() -> None:
    share = Share(by_rows(rx.make_mesh(4)), 8)
    data = {"x": np.full((2, 8), np.nan, np.float32), "n": np.arange(16).reshape(2, 8)}
    with jax.debug_nans(True), jax.transfer_guard("disallow"), jax.disable_jit():
        placed = share.place_rows(data, np.zeros((2, 8), int), np.full(2, 8)).stack
        assert {leaf.sharding.spec for leaf in placed.data.values()} == {P(None, "data")}
    assert np.isnan(placed.data["x"]).all()
    np.testing.assert_array_equal(placed.data["n"], data["n"])


@pytest.mark.parametrize("mode", [*ONE_PROGRAM, "exact"])
def test_several_steps_are_the_steps_one_by_one(mode: str) -> None:
    """The last batch is short: 26 of 32 rows are real."""
    dp, state = made(mode)
    before = dp.job.in_flight.begun
    wanted = one_by_one(dp, state, dp.feed(SOURCE, BATCH))
    [batches] = dp.feed(SOURCE, BATCH, stack=3)
    assert (len(batches), batches.rows) == (3, (32, 32, 26))
    found = dp.steps(state, batches)
    assert_alike(found, wanted, 1e-6)
    if dp.mode.bitwise:
        np.testing.assert_array_equal(found[0].params["w"], wanted[0].params["w"])
    assert dp.job.in_flight.begun - before == 6


@pytest.mark.parametrize("mode", ["jit", "exact"])
def test_batches_are_a_list_or_arrays_of_steps(mode: str) -> None:
    dp, state = made(mode)
    wanted = one_by_one(dp, state, slices(STACK))
    for batches in (STACK, slices(STACK), jax.tree.map(jnp.asarray, STACK)):
        assert_alike(dp.steps(state, batches), wanted, 1e-6)
    placed = [*dp.feed({name: leaf[:64] for name, leaf in SOURCE.items()}, BATCH)]
    assert_alike(dp.steps(state, placed), wanted, 1e-6)


def test_arrays_of_steps_are_padded() -> None:
    dp, state = made("jit")
    short = jax.tree.map(lambda leaf: leaf[:, :30], STACK)
    assert_alike(dp.steps(state, short), one_by_one(dp, state, slices(short)), 1e-6)


def test_a_feed_ends_with_fewer_batches() -> None:
    dp, _ = made("jit")
    assert [each.rows for each in dp.feed(SOURCE, BATCH, stack=2)] == [(32, 32), (26,)]


def test_shared_values_and_accumulation() -> None:
    def clipped(model: Any, batch: Any, key: Any) -> Any:
        return jnp.clip(batch["x"] @ model["w"] - batch["y"], -batch["c"], batch["c"]) ** 2

    dp, state = made("shard_map", loss=clipped, accumulate=2)
    wanted = one_by_one(dp, state, [{**each, "c": rx.Replicated(0.5)} for each in slices(STACK)])
    assert_alike(dp.steps(state, {**STACK, "c": rx.Replicated(0.5)}), wanted, 1e-6)


@pytest.mark.parametrize("mode", ONE_PROGRAM)
def test_a_scan_of_the_callers_is_the_steps(mode: str) -> None:
    dp, state = made(mode)
    wanted = one_by_one(dp, state, slices(STACK))
    assert_alike(jax.jit(lambda *given: jax.lax.scan(dp.step, *given))(state, STACK), wanted, 1e-6)
    [batches] = dp.feed({name: leaf[:64] for name, leaf in SOURCE.items()}, BATCH, stack=2)
    assert_alike(jax.lax.scan(dp.step, state, batches.stack), wanted, 1e-6)


def test_a_traced_step_pads_its_rows() -> None:
    dp, state = made("shard_map")
    short = {name: leaf[:30] for name, leaf in SOURCE.items()}
    after, metrics = jax.jit(dp.step)(state, short)
    expected, told = dp.step(state, short)
    np.testing.assert_allclose(after.params["w"], expected.params["w"], rtol=1e-6)
    np.testing.assert_allclose(metrics["loss"], told["loss"], rtol=1e-6)


def test_vmap_and_grad_over_a_step() -> None:
    """A population of two states, and the derivative of a loss by the initial parameters."""
    dp, state = made("jit")
    batch = slices(STACK)[0]
    both = jax.vmap(lambda scale: dp.step(_scaled(state, scale), batch)[1]["loss"])(
        jnp.asarray([1.0, 2.0])
    )
    alone = [float(dp.step(_scaled(state, scale), batch)[1]["loss"]) for scale in (1.0, 2.0)]
    np.testing.assert_allclose(both, alone, rtol=1e-6)

    def after_one_step(w: jax.Array) -> jax.Array:
        return dp.step(dataclasses.replace(state, params={"w": w}), batch)[1]["loss"]  # type: ignore[no-any-return]

    slope = jax.grad(after_one_step)(jnp.ones(3))
    error = batch["x"] @ np.ones(3) - batch["y"]
    np.testing.assert_allclose(slope, 2 * (error @ batch["x"]) / 32, rtol=1e-5)


def _scaled(state: rx.TrainState, scale: jax.Array) -> rx.TrainState:
    return dataclasses.replace(state, params=jax.tree.map(lambda leaf: scale * leaf, state.params))


def test_rows_that_leave_a_step_are_those_of_all_steps() -> None:
    def by_row(model: Any, batch: Any, key: Any) -> Any:
        error = batch["x"] @ model["w"] - batch["y"]
        return error**2, {"error": rx.ByRow(error)}

    dp, state = made("jit", loss=by_row, optimizer=optax.sgd(0.0))
    [batches] = dp.feed(SOURCE, BATCH, stack=3)
    _, metrics = dp.steps(state, batches)
    error = SOURCE["x"] @ MODEL["w"] - SOURCE["y"]
    np.testing.assert_allclose(metrics["error"].whole(), error, rtol=1e-5)


def test_a_custom_step_may_be_repeated() -> None:
    def step(state: Any, batch: Any, key: Any) -> Any:
        means, slope = rx.value_and_grad(lambda w, rows, key: loss({"w": w}, rows, key)[0])(
            state["w"], batch, key
        )
        return {"w": state["w"] - 0.1 * slope}, means

    dp, state = made("shard_map", step=step)
    wanted = one_by_one(dp, state, slices(STACK))
    assert_alike(dp.steps(state, STACK), wanted, 1e-6)
    assert_alike(jax.lax.scan(dp.step, state, STACK), wanted, 1e-6)


def test_rows_that_mix_are_refused_inside_a_program() -> None:
    dp, state = made("shard_map", loss=centred)
    for run in (jax.jit(dp.step), dp.step):
        with pytest.raises(rx.errors.LossError, match=r"rx\.gather"):
            run(state, slices(STACK)[0])
    with pytest.raises(rx.errors.LossError, match=r"rx\.gather"):
        dp.steps(state, STACK)


def test_batches_whose_padding_is_unknown() -> None:
    """A program of the caller's does not know how many rows of a feed's batch are real."""
    dp, state = made("jit", 2, loss=centred)
    batch = next(iter(dp.feed(SOURCE, BATCH)))
    with pytest.raises(rx.errors.LossError, match="padded rows"):
        jax.jit(dp.step)(state, batch)
    after, _ = jax.jit(dp.step)(state, batch.data)
    np.testing.assert_allclose(after.params["w"], dp.step(state, batch)[0].params["w"], rtol=1e-6)


def test_a_short_batch_that_is_computed_without_padding() -> None:
    """Then the steps are several programs, and the last batch is one of its own."""
    dp, state = made("jit", 2, loss=centred)
    wanted = one_by_one(dp, state, dp.feed(SOURCE, BATCH))
    [batches] = dp.feed(SOURCE, BATCH, stack=3)
    assert_alike(dp.steps(state, batches), wanted, 1e-6)


@pytest.mark.parametrize(
    ("call", "error", "said"),
    [
        (lambda dp, state: dp.steps(state, []), rx.errors.DataError, "0 steps"),
        (
            lambda dp, state: dp.steps(state, {"x": np.ones(3)}),
            rx.errors.DataError,
            r"\[steps, rows\]",
        ),
        (
            lambda dp, state: dp.steps(
                state, {"x": np.ones((2, 32, 3)), "y": np.ones((3, 32), np.float32)}
            ),
            rx.errors.DataError,
            r"\(2, 32\), \(3, 32\)",
        ),
        (
            lambda dp, state: dp.steps(state, [{**SOURCE, "set": rx.ExtraRows(SOURCE)}]),
            rx.errors.ConfigError,
            "ExtraRows",
        ),
        (
            lambda dp, state: dp.steps(state, state),
            rx.errors.StateError,
            "the batch is an rx.TrainState",
        ),
        (
            lambda dp, state: jax.jit(dp.evaluate)(state, [STACK]),
            rx.errors.StateError,
            "only dp.step",
        ),
    ],
)
def test_bad_calls(call: Any, error: Any, said: str) -> None:
    with pytest.raises(error, match=said):
        call(*made("jit"))


def test_a_mode_of_several_programs_is_refused_inside_a_program() -> None:
    dp, state = made("exact")
    with pytest.raises(rx.errors.ConfigError, match=r"dp\.steps"):
        jax.jit(dp.step)(state, slices(STACK)[0])
