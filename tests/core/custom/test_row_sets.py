"""Sets of rows of different sizes in one batch: each with its own mean, padding and split."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support import training
from support.custom_step import in_micro_batches

import replicax as rx

INSIDE, EDGE = 24, 10
MODEL = {"w": np.float32([0.3, 0.2, 0.1])}


def points(edge: int = EDGE) -> dict[str, Any]:
    random = np.random.default_rng(0)
    x = random.normal(size=(INSIDE, 3)).astype(np.float32)
    return {"x": x, "edge": rx.ExtraRows({"x": random.normal(size=(edge, 3)).astype(np.float32)})}


def residual(model: Any, batch: Any, key: Any) -> Any:
    return jnp.sin(batch["x"] @ model["w"]) ** 2


def boundary(model: Any, batch: Any, key: Any) -> Any:
    return (batch["x"] @ model["w"] - 1) ** 2


def step(state: Any, batch: Any, key: Any) -> Any:
    inside, first = rx.value_and_grad(residual)(state, {"x": batch["x"]}, key)
    edge, other, rows = rx.value_and_grad(boundary, rows=True)(state, batch["edge"], key)
    size = rx.mean(batch["edge"].map(lambda rows: jnp.abs(rows["x"][:, 0])))
    state = jax.tree.map(lambda leaf, a, b: leaf - 0.1 * (a + 0.5 * b), state, first, other)
    metrics = {"loss": inside["loss"] + 0.5 * edge["loss"], "size": size}
    return state, {**metrics, "rows": rx.ByRow(rows.map(lambda found: found["loss"]))}


def on_one_device(steps: int, batch: Any) -> tuple[Any, list[float]]:
    """Return the model and the losses of plain JAX."""
    model, losses = MODEL, []
    for _ in range(steps):

        def total(model: Any) -> Any:
            edge = jnp.mean(boundary(model, batch["edge"].value, None))
            return jnp.mean(residual(model, batch, None)) + 0.5 * edge

        value, gradient = jax.value_and_grad(total)(model)
        model = jax.tree.map(lambda leaf, slope: leaf - 0.1 * slope, model, gradient)
        losses.append(float(value))
    return model, losses


def parallel(custom: Any = step, mode: str = "jit", devices: int = 4, **more: Any) -> Any:
    return training.parallel(step=custom, mode=mode, devices=devices, **more)


@in_micro_batches
def test_it_equals_one_device(mode: str, devices: int, accumulate: int) -> None:
    dp = parallel(mode=mode, devices=devices, accumulate=accumulate)
    state, found = dp.init(MODEL), []
    for _ in range(3):
        state, metrics = dp.step(state, points())
        found.append(float(metrics["loss"]))
    model, losses = on_one_device(3, points())
    np.testing.assert_allclose(found, losses, rtol=1e-6)
    np.testing.assert_allclose(dp.model(state)["w"], model["w"], rtol=1e-6, atol=1e-7)
    edge = points()["edge"].value
    np.testing.assert_allclose(metrics["size"], np.abs(edge["x"][:, 0]).mean(), rtol=1e-6)
    before, _ = on_one_device(2, points())
    expected = boundary(before, edge, None)
    np.testing.assert_allclose(metrics["rows"].whole(), expected, rtol=1e-5, atol=1e-6)


def test_a_batch_may_have_sets_alone() -> None:
    def custom(state: Any, batch: Any, key: Any) -> Any:
        inside, _ = rx.value_and_grad(residual)(state, batch["inside"], key)
        edge, _ = rx.value_and_grad(boundary)(state, batch["edge"], key)
        return state, {"loss": inside["loss"] + 0.5 * edge["loss"]}

    for edge in (10, 3):
        batch = {"edge": points(edge)["edge"], "inside": rx.ExtraRows({"x": points(edge)["x"]})}
        dp = parallel(custom, "shard_map", accumulate=2)
        _, metrics = dp.step(dp.init(MODEL), batch)
        expected = on_one_device(1, points(edge))[1][0]
        np.testing.assert_allclose(metrics["loss"], expected, rtol=1e-6)


def test_a_run_of_batches_with_sets_resumes(tmp_path: Path) -> None:
    class Batches:
        def __iter__(self) -> Iterator[Any]:
            return iter([points(edge) for edge in (10, 10, 10)])

    def run(devices: int, folder: Path | None, until: int | None) -> Any:
        dp = parallel(devices=devices)
        with rx.Run(dp, dp.init(MODEL), Batches(), epochs=2, run_dir=folder) as run:
            for batch in run:
                run.step(batch)
                if run.place.step == until:
                    break
        return run

    run(4, tmp_path / "run", 2)
    resumed = run(2, tmp_path / "run", None)
    model, losses = on_one_device(6, points())
    np.testing.assert_allclose(resumed.dp.model(resumed.state)["w"], model["w"], rtol=1e-6)
    assert resumed.records[-1].metrics["loss"] == pytest.approx(np.mean(losses[3:]), rel=1e-6)


def with_edge(of: Any) -> Any:
    def custom(state: Any, batch: Any, key: Any) -> Any:
        means, _ = rx.value_and_grad(of)(state, batch["edge"], key)
        return state, {"loss": means["loss"]}

    return custom


def mixing(model: Any, batch: Any, key: Any) -> Any:
    values = boundary(model, batch, key)
    return (values - values.mean()) ** 2


def test_rows_of_a_set_that_mix_are_refused() -> None:
    dp = parallel(with_edge(mixing), "shard_map")
    with pytest.raises(rx.errors.LossError, match=r"rx\.gather"):
        dp.step(dp.init(MODEL), points(12))
    dp = parallel(with_edge(mixing), "shard_map", accumulate=2, devices=1)
    with pytest.raises(rx.errors.LossError, match="micro-batches"):
        dp.step(dp.init(MODEL), points(12))
    dp = parallel(with_edge(mixing))
    with pytest.raises(rx.errors.LossError, match="2 of 12 rows"):
        dp.step(dp.init(MODEL), points(10))
    _, metrics = dp.step(dp.init(MODEL), points(12))
    values = boundary(MODEL, points(12)["edge"].value, None)
    np.testing.assert_allclose(metrics["loss"], jnp.var(values), rtol=1e-5)


def test_rows_of_a_set_in_the_body_are_refused() -> None:
    def custom(state: Any, batch: Any, key: Any) -> Any:
        edge = jnp.mean(batch["edge"].value["x"])
        return state, {"loss": rx.mean(batch["x"][:, 0]) + edge}

    dp = parallel(custom, "shard_map")
    with pytest.raises(rx.errors.LossError, match=r"metrics\.loss"):
        dp.step(dp.init(MODEL), points(12))


@pytest.mark.parametrize(
    ("batch", "error", "said"),
    [
        (
            {"x": np.ones((24, 3)), "edge": np.ones((10, 3))},
            rx.errors.DataError,
            "24 rows.*10.*ExtraRows",
        ),
        (
            {"x": np.ones((24, 3)), "edge": rx.Replicated(np.ones((10, 3)))},
            rx.errors.LossError,
            "ExtraRows",
        ),
    ],
)
def test_other_ways_name_this_one(batch: Any, error: Any, said: str) -> None:
    dp = parallel(with_edge(boundary))
    with pytest.raises(error, match=said) as caught:
        dp.step(dp.init(MODEL), batch)
    assert "\n" not in str(caught.value)


def test_rows_of_a_set_are_never_taken_for_those_of_the_batch() -> None:
    def custom(state: Any, batch: Any, key: Any) -> Any:
        means, _ = rx.value_and_grad(boundary)(state, batch["edge"].value, key)
        return state, means

    dp = parallel(custom)
    for edge, size in ((EDGE, 12), (INSIDE - 2, INSIDE + 4), (INSIDE, INSIDE)):
        assert dp.split.padded_set(edge, real=INSIDE, size=INSIDE) == size
    for edge in (EDGE, INSIDE - 2):
        with pytest.raises(rx.errors.LossError, match=f"{INSIDE}"):
            dp.step(dp.init(MODEL), points(edge))


def test_a_set_made_in_the_step_is_refused() -> None:
    def custom(state: Any, batch: Any, key: Any) -> Any:
        return state, {"loss": rx.mean(rx.ExtraRows(batch["edge"].value["x"][:, 0]))}

    dp = parallel(custom)
    with pytest.raises(rx.errors.LossError, match="map"):
        dp.step(dp.init(MODEL), points())


def test_where_a_loss_is_called_on_the_batch_sets_are_refused() -> None:
    dp, built_in = parallel(), rx.DataParallel(residual, optax.sgd(0.1))
    with pytest.raises(rx.errors.ConfigError, match="ExtraRows"):
        built_in.step(built_in.init(MODEL), points())
    with pytest.raises(rx.errors.ConfigError, match="ExtraRows"):
        dp.evaluate(dp.init(MODEL), [points()], loss=residual)
    with pytest.raises(rx.errors.ConfigError, match="ExtraRows"):
        rx.verify(dp, MODEL, points())
