"""Values in a batch that are not rows: `rx.Replicated`."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support import training
from support.tiers import only
from support.training import assert_near

import replicax as rx

ROWS, BATCH, RATE = 52, 32, 0.05
PLACES: dict[str, dict[str, Any]] = {
    "single": {"mode": "single"},
    "jit": {},
    "accumulated": {"accumulate": 2},
    "fsdp": {"devices": 8, "layout": "fsdp"},
    "shard_map": {"mode": "shard_map"},
    "shard_map, accumulated": {"mode": "shard_map", "accumulate": 2},
    "pmap": {"mode": "pmap"},
    "exact": {"devices": 8, "mode": "exact", "micro_shards": 8},
}
places = pytest.mark.parametrize(
    "place", only(["accumulated", "shard_map, accumulated"], list(PLACES))
)
X = np.random.default_rng(0).normal(size=(ROWS, 4)).astype(np.float32)
MODEL = {"w": jnp.asarray(np.random.default_rng(1).normal(size=(8, 4)), jnp.float32)}


def values(number: int) -> dict[str, Any]:
    """Return a batch's shared values: a number, and a pytree with an array as long as a batch."""
    return {"clip": 9.0 + number, "target": {"w": np.linspace(0, number, BATCH), "n": number}}


def batches() -> list[dict[str, Any]]:
    return [
        {"x": X[at : at + BATCH], **{n: rx.Replicated(v) for n, v in values(number).items()}}
        for number, at in enumerate(range(0, ROWS, BATCH))
    ]


def loss(model: Any, batch: Any, key: Any) -> Any:
    target = batch["target"]
    error = jnp.sum((batch["x"] @ model["w"].T[:, :4] - target["w"][:4] - target["n"]) ** 2, -1)
    return jnp.minimum(error, batch["clip"]), {"clipped": (error > batch["clip"]) * 1.0}


def parallel(place: str, **more: Any) -> rx.DataParallel:
    given = (loss, optax.sgd(RATE)) if "step" not in more else ()
    return training.parallel(*given, **PLACES[place], **more)


def plain() -> list[dict[str, Any]]:
    """The batches with the values as they are."""
    return [{"x": batch["x"], **values(number)} for number, batch in enumerate(batches())]


@functools.cache
def on_one_device() -> tuple[Any, list[dict[str, float]]]:
    return training.by_hand(loss, optax.sgd(RATE), MODEL, plain())


@places
def test_every_replica_sees_them_whole(place: str) -> None:
    expected, told = on_one_device()
    assert 0 < told[0]["clipped"] < 1
    dp = parallel(place)
    state, found = training.train(dp, MODEL, dp.feed(batches(), BATCH))
    assert_near(found, told, atol=0)
    assert_near(dp.model(state), expected, rtol=1e-4)
    assert dp.program(state).step.cache_size() == 1


@places
def test_in_evaluation_and_predictions(place: str) -> None:
    dp = parallel(place)
    state = dp.init(MODEL)
    per_row = np.concatenate([loss(MODEL, batch, None)[0] for batch in plain()])
    assert dp.evaluate(state, batches())["loss"] == pytest.approx(per_row.mean(), rel=1e-5)
    predicted = dp.predict(state, batches(), lambda m, b, k: loss(m, b, k)[0], batch_size=BATCH)
    np.testing.assert_allclose(predicted, per_row, rtol=1e-4, atol=1e-5)


@places
def test_in_a_custom_step(place: str) -> None:
    def step(state: Any, batch: Any, key: Any) -> Any:
        means, gradient = rx.value_and_grad(loss)(state, batch, key)
        rate = batch["clip"].value * 0 + RATE
        return jax.tree.map(lambda p, g: p - rate * g, state, gradient), means

    if PLACES[place].get("layout") == "fsdp":
        pytest.skip("fsdp splits the state of a custom step alike: see test_custom_step")
    dp = parallel(place, step=step)
    _, found = training.train(dp, MODEL, batches())
    assert_near(found, on_one_device()[1], atol=0)


def test_beside_arrays_they_stay_for_an_epoch() -> None:
    source = {"x": X, **{n: rx.Replicated(v) for n, v in values(0).items()}}
    dp = parallel("jit")
    state = dp.init(MODEL)
    expected = float(loss(MODEL, {"x": X, **values(0)}, None)[0].mean())
    assert dp.evaluate(state, dp.feed(source, BATCH))["loss"] == pytest.approx(expected, rel=1e-5)
    result = rx.fit(dp, state, source, batch_size=BATCH, steps=2, progress=False)
    assert result.step == 2


def test_a_random_key_in_one_is_named() -> None:
    batch = {"x": X, "noise": rx.Replicated({"key": jax.random.key(0)})}
    with pytest.raises(rx.errors.DataError, match=r"batch\['noise'\]\['key'\]"):
        parallel("jit").feed(batch, 8).__iter__().__next__()


def test_only_rows_are_counted() -> None:
    dp = parallel("jit")
    with pytest.raises(rx.errors.DataError, match="no array"):
        dp.step(dp.init(MODEL), {"clip": rx.Replicated(1.0)})
    assert repr(rx.Replicated(0.2)) == "Replicated(0.2)"
