"""Functions that a loss may call, in every mode and outside of a step."""

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.tiers import only
from support.training import assert_near, by_hand, epochs, normals, slices, train

import replicax as rx

MODES = ("single", "jit", "shard_map", "pmap")
ROWS, BATCH = 52, 32
draw = normals(0)
MODEL = {"image": draw(6, 4), "text": draw(5, 4)}
DATA = {"image": draw(ROWS, 6), "text": draw(ROWS, 5)}


def clip(model: Any, batch: Any, key: Any) -> Any:
    """Each image against all texts, and each text against all images."""
    image, text = (
        unit / jnp.linalg.norm(unit, axis=1, keepdims=True)
        for unit in (batch[name] @ model[name] for name in ("image", "text"))
    )
    images, texts, real = rx.gather((image, text, rx.row_weights(image)))
    of_all = partial(jax.nn.logsumexp, axis=1, b=real)
    pairs = jnp.sum(image * text, axis=1)
    return (of_all(5 * image @ texts.T) + of_all(5 * text @ images.T)) / 2 - 5 * pairs


def clip_by_number(model: Any, batch: Any, key: Any) -> Any:
    """Each image against all texts, as a choice of its own among them."""
    image, text = (batch[name] @ model[name] for name in ("image", "text"))
    texts, real = rx.gather((text, rx.row_weights(text)))
    logits = jnp.where(real > 0, image @ texts.T, -jnp.inf)
    return optax.softmax_cross_entropy_with_integer_labels(logits, rx.row_numbers(image))


def normalised(model: Any, batch: Any, key: Any) -> Any:
    """PPO's advantage, normalised over the real rows of the minibatch."""
    own = batch["image"][:, 0]
    of_all, real = rx.gather((own, rx.row_weights(own)))
    mean = jnp.sum(of_all * real) / jnp.sum(real)
    variance = jnp.sum(real * (of_all - mean) ** 2) / jnp.sum(real)
    gap = batch["image"] @ model["image"] - batch["text"] @ model["text"]
    return (own - mean) / jnp.sqrt(variance + 1e-8) * jnp.mean(jnp.tanh(gap), axis=1)


def annealed(model: Any, batch: Any, key: Any) -> Any:
    rate = jnp.minimum(1.0, rx.step_number() / 3)
    return rate * jnp.sum((batch["image"] @ model["image"]) ** 2, axis=1)


Loss = Callable[[Any, Any, Any], Any]
OPTIMIZER = optax.sgd(0.1)


@pytest.mark.parametrize("mode", only(["shard_map"], MODES))
@pytest.mark.parametrize("loss", only([normalised], [clip, clip_by_number, normalised]))
def test_rows_that_see_one_another_give_what_one_device_gives(loss: Loss, mode: str) -> None:
    """The last batch of an epoch has 20 rows."""
    dp = rx.DataParallel(loss, OPTIMIZER, mode=mode)
    state, told = train(dp, MODEL, epochs(dp, DATA, BATCH, 2))
    params, expected = by_hand(loss, OPTIMIZER, MODEL, slices(DATA, BATCH) * 2)
    assert_near(told, expected, rtol=2e-6, atol=0)
    assert_near(dp.model(state), params, rtol=1e-4, atol=2e-6)


def test_evaluation_gathers_too() -> None:
    dp = rx.DataParallel(clip, OPTIMIZER, mode="shard_map")
    found = dp.evaluate(dp.init(MODEL), [DATA])
    assert found["loss"] == pytest.approx(float(jnp.mean(clip(MODEL, DATA, None))), rel=1e-6)


def test_a_gather_of_many_arrays_is_one_collective_there_and_one_back() -> None:
    dp = rx.DataParallel(clip, OPTIMIZER, mode="shard_map")
    rows = {name: value[:BATCH] for name, value in DATA.items()}
    compiled = dp.lower(MODEL, rows).compile().as_text()
    found = re.findall(r"(all-gather|reduce-scatter|all-reduce|all-to-all)(?:-start)?\(", compiled)
    assert sorted(found) == ["all-gather", "all-reduce", "reduce-scatter"]


def test_gathered_rows_are_in_the_order_of_the_batch_in_their_own_dtypes() -> None:
    def loss(model: Any, batch: Any, key: Any) -> Any:
        whole = rx.gather(batch)
        assert {name: leaf.dtype for name, leaf in whole.items()} == dtypes
        ordered = jnp.all(whole["row"] == jnp.arange(8)) & jnp.all(
            whole["x"][:, 1, 0] == whole["row"]
        )
        return jnp.where(ordered, batch["x"][:, 0, 0] * model, jnp.nan)

    rows = np.arange(8)
    batch = {
        "row": rows.astype(np.int32),
        "x": np.tile(rows[:, None, None], (1, 2, 3)).astype(np.float32),
        "half": rows.astype(np.float16),
    }
    dtypes = {name: leaf.dtype for name, leaf in batch.items()}
    dp = rx.DataParallel(loss, OPTIMIZER, mode="shard_map")
    _, metrics = dp.step(dp.init(jnp.ones(())), batch)
    assert float(metrics["loss"]) == pytest.approx(3.5)


NUMBERED = [{"mode": "shard_map", "accumulate": 2}, {"accumulate": 3}, {"mode": "exact"}]


@pytest.mark.parametrize("arguments", only(NUMBERED[:1], NUMBERED))
def test_a_row_has_the_same_number_and_draws_by_it_wherever_it_is(arguments: Any) -> None:
    def step(model: Any, batch: Any, key: Any) -> Any:
        def loss(model: Any, rows: Any, key: Any) -> Any:
            number = rx.row_numbers(rows["x"])
            noise = jax.vmap(partial(jax.random.fold_in, model["key"]))(number)
            drawn = jax.vmap(jax.random.uniform)(noise)
            return drawn * rows["x"], {"apart": (number - rows["own"]) ** 2.0}

        rows = {**batch, "own": rx.row_numbers(batch)}
        means, _, by_row = rx.value_and_grad(loss, rows=True)(model, rows, None)
        return model, {**means, "drawn": rx.ByRow(by_row["loss"])}

    model, x = {"w": jnp.ones(()), "key": jax.random.key(3)}, np.ones(29, np.float32)
    dp = rx.DataParallel(step=step, **arguments)
    _, metrics = dp.step(dp.init(model), {"x": x})
    _, expected = step(model, {"x": x}, None)
    np.testing.assert_allclose(metrics["drawn"].whole(), expected["drawn"].value, rtol=1e-6)
    assert float(metrics["apart"]) == 0


def test_outside_of_a_step_all_is_as_on_one_device() -> None:
    rows = {"x": jnp.arange(6.0).reshape(3, 2)}
    assert rx.gather(rows)["x"] is rows["x"]
    assert rx.row_weights(rows).tolist() == [1, 1, 1]
    assert rx.row_numbers(rows).tolist() == [0, 1, 2]
    assert int(rx.step_number()) == 0


@pytest.mark.parametrize("mode", only(["shard_map", "exact"], [*MODES, "exact"]))
def test_a_loss_follows_the_number_of_the_step(mode: str) -> None:
    dp = rx.DataParallel(annealed, optax.sgd(0.0), mode=mode)
    state = dp.init(MODEL)
    assert dp.evaluate(state, [DATA])["loss"] == 0
    full = float(jnp.mean(jnp.sum((DATA["image"] @ MODEL["image"]) ** 2, axis=1)))
    for step in range(5):
        state, metrics = dp.step(state, DATA)
        assert float(metrics["loss"]) == pytest.approx(min(1.0, step / 3) * full, rel=1e-5)
    assert dp.evaluate(state, [DATA])["loss"] == pytest.approx(full, rel=1e-5)


def test_gathering_the_rows_of_a_micro_batch_is_refused() -> None:
    dp = rx.DataParallel(clip, OPTIMIZER, accumulate=2)
    with pytest.raises(rx.errors.LossError, match=r"rx\.gather .*micro-batches.*accumulate=1"):
        dp.step(dp.init(MODEL), DATA)


def test_what_is_jitted_within_a_loss_gathers_where_it_runs() -> None:
    @jax.jit
    def inner(values: Any) -> Any:
        return jnp.mean(rx.gather(values))

    def loss(model: Any, batch: Any, key: Any) -> Any:
        return model * (batch["x"] - inner(batch["x"])) ** 2

    batch = {"x": np.arange(8, dtype=np.float32)}
    for mode in ("jit", "shard_map", "single"):
        inner(jnp.arange(2.0))  # traced alone, for as many rows as a replica has
        dp = rx.DataParallel(loss, OPTIMIZER, mode=mode)
        _, metrics = dp.step(dp.init(jnp.ones(())), batch)
        assert float(metrics["loss"]) == pytest.approx(np.var(batch["x"]))


@pytest.mark.parametrize("what", [rx.row_weights, rx.row_numbers, lambda rows: rx.step_number()])
def test_what_belongs_to_the_step_is_not_asked_within_another_transformation(what: Any) -> None:
    def loss(model: Any, batch: Any, key: Any) -> Any:
        return model * batch["x"] * jax.jit(what)(batch["x"])

    dp = rx.DataParallel(loss, OPTIMIZER)
    with pytest.raises(rx.errors.LossError, match=r"^rx\.\w+ .*called inside .*jax\.jit"):
        dp.step(dp.init(jnp.ones(())), {"x": np.ones(8, np.float32)})


@pytest.mark.parametrize("what", [rx.gather, rx.row_weights])
def test_other_rows_than_those_of_the_batch_are_refused(what: Any) -> None:
    def loss(model: Any, batch: Any, key: Any) -> Any:
        what(batch["x"][:3])
        return model * batch["x"]

    dp = rx.DataParallel(loss, OPTIMIZER)
    with pytest.raises(rx.errors.LossError, match=r"3 rows\b.*\b8\b"):
        dp.step(dp.init(jnp.ones(())), {"x": np.ones(8, np.float32)})
