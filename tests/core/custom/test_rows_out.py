"""Results with an entry for each row: whole, in order, without padding, in every mode."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.tiers import only
from support.training import parallel

import replicax as rx

ROWS = 30
MODES = [("jit", 4), ("shard_map", 4), ("pmap", 2), ("exact", 2), ("single", 1)]
SETTINGS = [{}, {"accumulate": 2}, {"layout": "zero1"}, {"layout": "fsdp"}]
CASES = [
    (mode, devices, settings)
    for mode, devices in MODES
    for settings in SETTINGS
    if "layout" not in settings or mode in ("jit", "shard_map")
]
MODEL = {"w": np.float32([0.5, 0.0, -1.0])}


def rows() -> dict[str, np.ndarray]:
    x = np.random.default_rng(0).normal(size=(ROWS, 3)).astype(np.float32)
    return {"x": x, "y": x @ np.float32([1, 2, 3]), "number": np.arange(ROWS)}


def loss(model: Any, batch: Any, key: Any) -> Any:
    error = batch["x"] @ model["w"] - batch["y"]
    by_row = {"error": error, "above": error > 0, "number": batch["number"]}
    return error**2, {"size": jnp.abs(error), "by_row": rx.ByRow(by_row)}


def step(state: Any, batch: Any, key: Any) -> Any:
    """Weigh each row by its error, without a second forward pass."""
    means, _, found = rx.value_and_grad(loss, rows=True)(state, batch, key)

    def weighted(model: Any, batch: Any, key: Any) -> Any:
        return loss(model, batch, key)[0] * batch["weight"]

    seen = {**batch, "weight": found["size"]}
    weighed, gradient = rx.value_and_grad(weighted)(state, seen, key)
    model = jax.tree.map(lambda leaf, slope: leaf - 0.01 * slope, state, gradient)
    return model, {**weighed, "plain": means["loss"], "found": rx.ByRow(found)}


@pytest.mark.parametrize(
    ("mode", "devices", "settings"), only([("shard_map", 4, {}), ("jit", 4, SETTINGS[1])], CASES)
)
def test_a_loss_returns_rows(mode: str, devices: int, settings: Any) -> None:
    dp = parallel(loss, optax.sgd(0.1), mode=mode, devices=devices, **settings)
    _, metrics = dp.step(dp.init(MODEL), rows())
    assert sorted(metrics) == ["by_row", "loss", "size"]
    found, error = metrics["by_row"].whole(), rows()["x"] @ MODEL["w"] - rows()["y"]
    np.testing.assert_allclose(found["error"], error, rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(found["above"], error > 0)
    np.testing.assert_array_equal(found["number"], np.arange(ROWS))


@pytest.mark.parametrize(("mode", "devices"), only([("shard_map", 4)], MODES))
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_custom_step_gets_rows_and_returns_them(mode: str, devices: int, accumulate: int) -> None:
    dp = parallel(mode=mode, devices=devices, accumulate=accumulate, step=step)
    _, metrics = dp.step(dp.init(MODEL), rows())
    error = rows()["x"] @ MODEL["w"] - rows()["y"]
    found = metrics["found"].whole()
    assert sorted(found) == ["by_row", "loss", "size"]
    np.testing.assert_allclose(found["loss"], error**2, rtol=1e-5)
    np.testing.assert_allclose(metrics["loss"], np.mean(np.abs(error) ** 3), rtol=1e-6)
    np.testing.assert_allclose(metrics["plain"], np.mean(error**2), rtol=1e-6)


def test_exact_returns_the_same_bits_on_any_devices() -> None:
    found = []
    for devices in (1, 2, 8):
        dp = parallel(loss, optax.sgd(0.1), mode="exact", devices=devices)
        _, metrics = dp.step(dp.init(MODEL), rows())
        found.append(metrics["by_row"].whole()["error"].tobytes())
    assert len(set(found)) == 1


def test_rows_may_be_constants_in_exact() -> None:
    def of_step(state: Any, batch: Any, key: Any) -> Any:
        return state, {"loss": rx.mean(batch["y"]), "ones": rx.ByRow(jnp.ones(len(batch["y"])))}

    dp = parallel(mode="exact", devices=2, step=of_step)
    _, metrics = dp.step(dp.init(MODEL), rows())
    np.testing.assert_array_equal(metrics["ones"].whole(), np.ones(ROWS))


def test_rows_move_nothing_between_devices() -> None:
    def with_and_without(returned: Any) -> Any:
        dp = parallel(returned, optax.sgd(0.1), mode="shard_map")
        text = dp.lower(MODEL, rows()).compile().as_text()
        return re.findall(r"= (.+) ((?:all|reduce|collective)-[a-z-]+)\(", text)

    plain = with_and_without(lambda *given: (loss(*given)[0], {"size": loss(*given)[1]["size"]}))
    assert plain
    assert with_and_without(loss) == plain


def test_outside_of_a_step_rows_are_all_rows() -> None:
    means, gradient, found = rx.value_and_grad(loss, rows=True)(MODEL, rows())
    np.testing.assert_allclose(found["loss"].mean(), means["loss"], rtol=1e-6)
    assert found["by_row"]["above"].dtype == bool
    assert gradient["w"].shape == (3,)


def test_evaluation_has_means_alone() -> None:
    dp = parallel(loss, optax.sgd(0.1))
    means = dp.evaluate(dp.init(MODEL), dp.feed(rows(), 8))
    assert sorted(means) == ["loss", "rows", "size"]


@pytest.mark.parametrize(
    ("returned", "error", "said"),
    [
        (
            lambda error: rx.ByRow(error - jnp.mean(error)),
            rx.errors.LossError,
            "depends on the other",
        ),
        (lambda error: rx.ByRow({"a": error[:3]}), rx.errors.LossError, r"'a'.*\(3,\)"),
        (lambda error: rx.ByRow(jnp.mean(error)), rx.errors.LossError, r"\(\)"),
    ],
)
def test_results_that_are_not_of_a_row_are_refused(returned: Any, error: Any, said: str) -> None:
    def of_loss(model: Any, batch: Any, key: Any) -> Any:
        values, metrics = loss(model, batch, key)
        return values, {"found": returned(metrics["by_row"].value["error"])}

    def of_step(state: Any, batch: Any, key: Any) -> Any:
        found = returned(batch["y"])
        return state, {"loss": rx.mean(batch["y"]), "found": found}

    for dp in (
        parallel(of_loss, optax.sgd(0.1), mode="shard_map"),
        parallel(step=of_step, mode="shard_map"),
    ):
        with pytest.raises(error, match=said) as caught:
            dp.step(dp.init(MODEL), rows())
        assert "\n" not in str(caught.value)


def test_islands_refuse_them() -> None:
    rounds = rx.Rounds(every=2, axis="data")
    dp = parallel(loss, optax.sgd(0.1), mode="shard_map", devices=2, rounds=rounds)
    with pytest.raises(rx.errors.ConfigError, match="ByRow"):
        dp.step(dp.init(MODEL), rows())


class Seen(rx.Hook):
    """Keep the rows of each step's results."""

    def __init__(self) -> None:
        self.numbers: list[int] = []

    def step(self, run: Any, step: Any) -> None:
        self.numbers.append(len(step.by_row["by_row"].whole()["number"]))


def test_a_run_has_them_in_hooks_and_in_its_loop() -> None:
    dp, seen = parallel(loss, optax.sgd(0.1)), Seen()
    order = []
    with rx.Run(dp, dp.init(MODEL), rows(), batch_size=8, epochs=1, hooks=[seen]) as run:
        for batch in run:
            order += run.step(batch)["by_row"].whole()["number"].tolist()
    assert sorted(order) == list(range(ROWS))
    assert seen.numbers == [8, 8, 8, 6]
    assert all(sorted(record.metrics) == ["loss", "size"] for record in run.records)


class Replay:
    """Prioritized replay: the next batch depends on what the loop has done."""

    def __init__(self, done: list[int]) -> None:
        self._done = done

    def __iter__(self) -> Any:
        return self.batches()

    def batches(self) -> Any:
        for _ in range(6):
            batch = {name: leaf[:8] for name, leaf in rows().items()}
            yield {**batch, "done": np.full(8, len(self._done))}


@pytest.mark.parametrize(
    ("opened", "chosen"),
    [(Replay, {}), (lambda done: Replay(done).batches(), {}), (Replay, {"prefetch": 0})],
)
def test_a_generator_sees_what_the_loop_did(opened: Any, chosen: dict[str, int]) -> None:
    done: list[int] = []

    def of_done(model: Any, batch: Any, key: Any) -> Any:
        return loss(model, batch, key)[0], {"done": rx.ByRow(batch["done"])}

    dp = parallel(of_done, optax.sgd(0.1))
    with rx.Run(dp, dp.init(MODEL), opened(done), steps=6, progress=False, **chosen) as run:
        for batch in run:
            done.append(int(run.step(batch)["done"].whole()[0]))
    assert done == [0, 1, 2, 3, 4, 5]
