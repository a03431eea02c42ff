"""Rows that only seem to meet are accepted, and each new number of rows is checked."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.row_losses import DATA, MODEL, Loss, error, output, stepped
from support.training import assert_near, parallel

import replicax as rx


def two_views(model: Any, batch: Any, key: Any) -> Any:
    """Both views encoded as one batch, as in siamese networks."""
    both = jnp.tanh(jnp.concatenate([batch["x"], 2 * batch["x"]]) @ model["w"])
    one, other = jnp.split(both, 2)
    return jnp.sum((one - other) ** 2, axis=1)


def interleaved(model: Any, batch: Any, key: Any) -> Any:
    both = jnp.stack([batch["x"], 2 * batch["x"]], axis=1).reshape(-1, 5) @ model["w"]
    return jnp.sum(jnp.diff(both.reshape(-1, 2, 3), axis=1)[:, 0] ** 2, axis=1)


def time_major(model: Any, batch: Any, key: Any) -> Any:
    steps = jnp.stack([batch["x"], batch["x"] ** 2])
    found = jax.nn.relu(steps.reshape(-1, 5) @ model["w"]).reshape(2, -1, 3)
    return jnp.sum((found - batch["y"]) ** 2, axis=(0, 2))


def mean_of_reversed(model: Any, batch: Any, key: Any) -> Any:
    return jnp.mean(error(model, {name: leaf[::-1] for name, leaf in batch.items()})[::-1])


def in_chunks(model: Any, batch: Any, key: Any) -> Any:
    return jax.lax.map(lambda row: jnp.sum((row @ model["w"]) ** 2), batch["x"], batch_size=2)


def reversed_in_a_loop(model: Any, batch: Any, key: Any) -> Any:
    turn = lambda _, x: jnp.tanh(x[::-1])[::-1]  # noqa: E731
    return error(model, {**batch, "x": jax.lax.fori_loop(0, 2, turn, batch["x"])})


def solved(model: Any, batch: Any, key: Any) -> Any:
    found = output(model, batch)
    matrices = jnp.einsum("bi,bj->bij", found, found) + jnp.eye(3)
    return jnp.sum(jnp.linalg.solve(matrices, batch["y"][..., None])[..., 0] ** 2, axis=1)


def looked_up(model: Any, batch: Any, key: Any) -> Any:
    """The place of a number in its row, as in an inverse transform."""
    places = jax.vmap(jnp.searchsorted)(jnp.sort(batch["x"], axis=1), batch["y"][:, 0])
    return error(model, batch) * (1 + places)


def until_small(model: Any, batch: Any, key: Any) -> Any:
    """The number of iterations differs between rows."""
    small = jax.vmap(
        lambda row: jax.lax.while_loop(lambda x: jnp.sum(x**2) > 0.1, lambda x: x / 2, row)
    )
    return error(model, batch) * jnp.sum(small(batch["x"]), axis=1)


def own_entry(model: Any, batch: Any, key: Any) -> Any:
    rows = jnp.arange(len(batch["x"]))
    return jnp.sum(output(model, batch).at[rows, batch["label"]].add(-1.0) ** 2, axis=1)


def fourier(model: Any, batch: Any, key: Any) -> Any:
    return error(model, {**batch, "x": jnp.abs(jnp.fft.fft(batch["x"]))})


def a_coefficient_for_each(model: Any, batch: Any, key: Any) -> Any:
    share = jax.random.beta(key, 1.0, 1.0, (len(batch["x"]), 1))
    return error(model, {**batch, "x": batch["x"] * share})


def noisy_views(model: Any, batch: Any, key: Any) -> Any:
    both = jnp.concatenate([batch["x"], batch["x"]])
    both = (both + jax.random.normal(key, both.shape)) @ model["w"]
    return jnp.sum(jnp.diff(both.reshape(2, -1, 3), axis=0)[0] ** 2, axis=1)


def labels_of_ones(model: Any, batch: Any, key: Any) -> Any:
    ones = np.ones((len(batch["x"]), 3), np.float32)
    return jnp.sum((output(model, batch) - ones) ** 2, axis=1)


RANDOM = [noisy_views, a_coefficient_for_each]
APART = [
    *RANDOM,
    *(
        labels_of_ones,
        two_views,
        interleaved,
        time_major,
        mean_of_reversed,
        in_chunks,
        reversed_in_a_loop,
    ),
    *(solved, until_small, own_entry, fourier, looked_up),
]


@pytest.mark.parametrize("loss", APART)
def test_rows_that_seem_to_meet_are_accepted(loss: Loss) -> None:
    """Losses without random numbers also train as on one device."""
    found = stepped(loss, mode="shard_map")
    if loss not in RANDOM:
        assert_near(found, stepped(loss, mode="single"))


def test_padding_is_looked_at_for_each_number_of_rows() -> None:
    def loss(model: Any, batch: Any, key: Any) -> Any:
        count = len(batch["x"])
        return error(model, batch) * (count // 8 * 8 / count)  # 1 of 16 rows and of 8

    dp = parallel(loss, optax.sgd(0.1))
    state = dp.init(MODEL)
    (batch,) = dp.feed({name: leaf[:13] for name, leaf in DATA.items()}, 16)
    with pytest.raises(rx.errors.LossError, match=r"3 of\b"):
        dp.step(state, batch)


def test_code_that_depends_on_the_rank_of_few_rows() -> None:
    def loss(model: Any, batch: Any, key: Any) -> Any:
        return error(model, batch) + 0 * jnp.squeeze(batch["x"][:, :1])

    dp = rx.DataParallel(loss, optax.sgd(0.1), mode="shard_map")
    dp.step(dp.init(MODEL), {name: leaf[:8] for name, leaf in DATA.items()})


def test_rows_are_moved_in_a_loss_of_a_custom_step() -> None:
    def step(model: Any, batch: Any, key: Any) -> Any:
        means, gradient = rx.value_and_grad(mean_of_reversed)(model, batch, key)
        return jax.tree.map(lambda p, g: p - 0.1 * g, model, gradient), means

    dp = rx.DataParallel(step=step, accumulate=2)
    state, _ = dp.step(dp.init(MODEL), DATA)
    assert_near(dp.model(state), stepped(mean_of_reversed, mode="single"))


def test_batches_of_another_size_are_looked_at_too() -> None:
    def loss(model: Any, batch: Any, key: Any) -> Any:
        found = error(model, batch)
        return found if len(found) >= 8 else found * jnp.mean(found)

    dp = parallel(loss, optax.sgd(0.1), mode="shard_map", devices=2)
    state, _ = dp.step(dp.init(MODEL), DATA)
    with pytest.raises(rx.errors.LossError, match=r"number\b"):
        dp.step(state, {name: leaf[:8] for name, leaf in DATA.items()})


def test_one_row_for_each_replica() -> None:
    def loss(model: Any, batch: Any, key: Any) -> Any:
        return jnp.sum(error(model, batch)) / max(len(batch["x"]), 2)

    dp = rx.DataParallel(loss, optax.sgd(0.1), mode="shard_map")
    with pytest.raises(rx.errors.LossError, match=r"one number\b"):
        dp.step(dp.init(MODEL), {name: leaf[:8] for name, leaf in DATA.items()})


def test_a_complex_number_of_rows() -> None:
    def loss(model: Any, batch: Any, key: Any) -> Any:
        return error(model, batch) * jnp.real(batch["x"][:, 0] * (2j / len(batch["x"])) ** 2)

    with pytest.raises(rx.errors.LossError, match=r"number\b"):
        stepped(loss, mode="shard_map")
