"""A loss that names the axis of the rows, as a library's BatchNorm may: right where it sees all."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from support import training
from support.tiers import only

import replicax as rx

PLACES = [("single", 1), ("jit", 1), ("jit", 4)]
ROWS = 24
MODEL = {"w": np.float32([0.5, -1.0, 0.25])}


def rows() -> dict[str, np.ndarray]:
    x = np.random.default_rng(0).normal(size=(ROWS, 3)).astype(np.float32)
    return {"x": x, "y": x @ np.float32([1, 2, 3])}


def begun() -> rx.Stateful:
    return rx.Stateful(MODEL, {"mean": jnp.zeros(3)})


def loss_over(axis: str | None) -> Any:
    """Return a loss with normalized inputs, whose statistics are averaged over `axis`."""

    def average(values: Any) -> Any:
        return values if axis is None else lax.pmean(values, axis)

    def loss(model: Any, batch: Any, key: Any) -> Any:
        mean = average(jnp.mean(batch["x"], axis=0)) if key is not None else model.state["mean"]
        errors = (batch["x"] - mean) @ model.model["w"] - batch["y"]
        return rx.NewState(errors**2, {"mean": 0.9 * model.state["mean"] + 0.1 * mean})

    return loss


def custom(of: Any) -> Any:
    def step(state: Any, batch: Any, key: Any) -> Any:
        means, gradient, written = rx.value_and_grad(of)(state, batch, key)
        model = jax.tree.map(lambda leaf, slope: leaf - 0.1 * slope, state.model, gradient)
        return rx.Stateful(model, written), means

    return step


def parallel(of: Any, mode: str, devices: int, own: bool, **more: Any) -> rx.DataParallel:
    given = {"step": custom(of)} if own else {"loss": of, "optimizer": optax.sgd(0.1)}
    return training.parallel(mode=mode, devices=devices, **given, **more)


def trained(dp: rx.DataParallel) -> tuple[Any, list[float]]:
    state, told = training.train(dp, begun(), [rows()] * 3)
    return dp.model(state), training.losses(told)


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize(("mode", "devices"), only([("jit", 4)], PLACES))
def test_statistics_are_those_of_the_global_batch(mode: str, devices: int, own: bool) -> None:
    model, losses = trained(parallel(loss_over("data"), mode, devices, own))
    expected, theirs = trained(parallel(loss_over(None), "single", 1, own))
    np.testing.assert_allclose(losses, theirs, rtol=1e-6)
    np.testing.assert_allclose(model.state["mean"], expected.state["mean"], rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(model.model["w"], expected.model["w"], rtol=1e-6, atol=1e-6)


def test_evaluation_and_prediction_may_name_it_too() -> None:
    def named(model: Any, batch: Any, key: Any) -> Any:
        return lax.pmean(batch["x"] @ model.model["w"], "data")

    dp = parallel(loss_over("data"), "jit", 4, False)
    state, feed = dp.init(begun()), dp.feed(rows(), 8)
    expected = rows()["x"] @ MODEL["w"]
    means = dp.evaluate(state, feed, loss=named)
    assert means["loss"] == pytest.approx(expected.mean(), rel=1e-5)
    np.testing.assert_allclose(dp.predict(state, feed, named), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("mode", ["shard_map", "pmap", "exact"])
def test_where_replicas_see_their_own_rows_it_is_refused(mode: str, own: bool) -> None:
    dp = parallel(loss_over("data"), mode, 2, own)
    with pytest.raises(rx.errors.LossError, match="mode='jit'"):
        dp.step(dp.init(begun()), rows())


def test_micro_batches_and_other_axes_are_refused() -> None:
    dp = parallel(loss_over("data"), "jit", 1, False, accumulate=2)
    with pytest.raises(rx.errors.LossError, match="accumulate=1"):
        dp.step(dp.init(begun()), rows())
    dp = parallel(loss_over("model"), "jit", 1, False)
    with pytest.raises(rx.errors.LossError, match="model"):
        dp.step(dp.init(begun()), rows())
