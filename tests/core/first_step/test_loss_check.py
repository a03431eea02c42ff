"""A loss whose rows depend on one another is found before the first step."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from support.row_losses import DATA, MODEL, ROWS, Loss, error
from support.tiers import only
from support.training import parallel

import replicax as rx


def errors(model: Any, batch: Any, key: Any) -> Any:
    return error(model, batch)


def logits(model: Any, batch: Any) -> Any:
    return batch["x"] @ model["w"] @ batch["y"].T


def contrastive(model: Any, batch: Any, key: Any) -> Any:
    scores = logits(model, batch)
    return optax.softmax_cross_entropy_with_integer_labels(scores, jnp.arange(len(scores)))


def normalised(model: Any, batch: Any, key: Any) -> Any:
    return errors(model, batch, key) * (batch["x"][:, 0] - jnp.mean(batch["x"][:, 0]))


def by_count(model: Any, batch: Any, key: Any) -> Any:
    return errors(model, batch, key) / len(batch["x"])


def by_place(model: Any, batch: Any, key: Any) -> Any:
    return errors(model, batch, key) * jnp.arange(len(batch["x"]))


def by_largest_weight(model: Any, batch: Any, key: Any) -> Any:
    weights = jnp.exp(batch["x"][:, 0])
    return rx.Weighted(errors(model, batch, key), weights / jnp.max(weights))


def normalised_where_true(model: Any, batch: Any, key: Any) -> Any:
    return rx.Weighted(normalised(model, batch, key), batch["y"][:, 0] > 0)


def total(model: Any, batch: Any, key: Any) -> Any:
    return jnp.sum(errors(model, batch, key))


def masked_mean(model: Any, batch: Any, key: Any) -> Any:
    real = batch["x"][:, 0] > 0
    return jnp.sum(errors(model, batch, key) * real) / jnp.sum(real)


def guarded_mean(model: Any, batch: Any, key: Any) -> Any:
    real = batch["x"][:, 0] > 0
    return jnp.sum(errors(model, batch, key) * real) / jnp.maximum(jnp.sum(real), 1)


def hardest_half(model: Any, batch: Any, key: Any) -> Any:
    return jnp.mean(jnp.sort(errors(model, batch, key))[ROWS // 2 :])


def all_pairs(model: Any, batch: Any, key: Any) -> Any:
    scores = batch["x"] @ model["w"]
    return jnp.mean(jnp.exp(-jnp.sum((scores[:, None] - scores[None]) ** 2, axis=2)))


def mean(model: Any, batch: Any, key: Any) -> Any:
    return jnp.mean(errors(model, batch, key))


def dropped(model: Any, batch: Any, key: Any) -> Any:
    x = batch["x"]
    if key is not None:
        x = x * jax.random.bernoulli(key, 0.5, x.shape)
    return errors(model, {**batch, "x": x}, key)


def mixed_up(model: Any, batch: Any, key: Any) -> Any:
    """Rows are mixed only in training, with others drawn at random."""
    x = batch["x"] if key is None else batch["x"] + jax.random.permutation(key, batch["x"])
    return errors(model, {**batch, "x": x}, key)


def mean_mixed_up(model: Any, batch: Any, key: Any) -> Any:
    return jnp.mean(mixed_up(model, batch, key))


def mean_mixed_up_by_keys_of_rows(model: Any, batch: Any, key: Any) -> Any:
    keys = jax.random.split(key, len(batch["x"]))
    order = jnp.argsort(jax.vmap(jax.random.uniform)(keys))
    return jnp.mean(errors(model, {**batch, "x": batch["x"] + batch["x"][order]}, key))


def always_random(model: Any, batch: Any, key: Any) -> Any:
    return errors(model, batch, key) * jax.random.uniform(jax.random.fold_in(key, 0))


def there_and_back(model: Any, batch: Any, key: Any) -> Any:
    """Rows stay apart, but the trace does not show it."""
    return errors(model, {name: leaf[::-1] for name, leaf in batch.items()}, key)[::-1]


def gathered_of_some(model: Any, batch: Any, key: Any) -> Any:
    """The gathered values were mixed before, among the rows of one replica."""
    scores = batch["x"] @ model["w"]
    return scores[:, 0] - rx.gather(scores - scores.mean(0)).max()


def own_logit(model: Any, batch: Any, key: Any) -> Any:
    """The positive is at the row's index within its replica."""
    rows = jnp.arange(len(batch["x"]))
    return (batch["y"] @ rx.gather(batch["x"] @ model["w"]).T)[rows, rows]


def at_least(model: Any, batch: Any, key: Any) -> Any:
    return jnp.sum(errors(model, batch, key)) / max(len(batch["x"]), ROWS)


def first_row(model: Any, batch: Any, key: Any) -> Any:
    scores = batch["x"] @ model["w"]
    return jax.lax.dynamic_update_slice(scores, jnp.zeros((1, 3)), (0, 0))[:, 0] ** 2


def column_by_count(model: Any, batch: Any, key: Any) -> Any:
    return (batch["x"] @ model["w"])[:, len(batch["x"]) // ROWS] ** 2


def beside_a_huge_one(model: Any, batch: Any, key: Any) -> Any:
    return jnp.where(batch["x"][:, 0] > 1, 1e9, normalised(model, batch, key))


def one_sign_for_all(model: Any, batch: Any, key: Any) -> Any:
    sign = jax.random.rademacher(key, (3,), jnp.float32)
    scores = batch["x"] @ model["w"] * sign
    return jnp.sum(scores - rx.gather(scores)[0], axis=1)


def in_rare_steps(model: Any, batch: Any, key: Any) -> Any:
    """Mixes rows in a step that no trial takes."""
    rare = rx.step_number() % 11 == 6
    return jnp.where(rare, normalised(model, batch, key), errors(model, batch, key))


MEET = [
    in_rare_steps,
    *(contrastive, normalised, by_count, by_place, by_largest_weight, normalised_where_true),
    *(mixed_up, first_row, column_by_count, beside_a_huge_one),
]
MEAN_OTHERWISE = [total, masked_mean, guarded_mean, at_least]
ORDERED = [mean_mixed_up, mean_mixed_up_by_keys_of_rows, hardest_half, all_pairs]
GATHER_WRONGLY = [gathered_of_some, own_logit, one_sign_for_all]
STAY_APART = [errors, mean, dropped, always_random, there_and_back]
DIVIDED = [{"mode": "shard_map"}, {"mode": "pmap"}, {"mode": "exact"}, {"accumulate": 2}]


def step(loss: Loss, model: Any = MODEL, rows: int = ROWS, **arguments: Any) -> rx.DataParallel:
    """Return a `DataParallel` that has taken a step."""
    dp = rx.DataParallel(loss, optax.sgd(0.01), **arguments)
    dp.step(dp.init(model), {name: leaf[:rows] for name, leaf in DATA.items()})
    return dp


@pytest.mark.parametrize("arguments", only([DIVIDED[0]], DIVIDED))
@pytest.mark.parametrize("loss", [*MEET, *MEAN_OTHERWISE, *ORDERED])
def test_a_loss_that_needs_all_rows_is_refused_where_it_would_see_some(
    loss: Loss, arguments: dict[str, Any]
) -> None:
    with pytest.raises(rx.errors.LossError, match=r"some of\b") as caught:
        step(loss, **arguments)
    said = str(caught.value)
    assert " - [" not in said  # nothing was broadcast
    assert ("rx.Weighted" in said) == (loss in MEAN_OTHERWISE)
    if loss not in MEAN_OTHERWISE:
        assert ("rx.gather" in said) == (arguments.get("mode") in ("shard_map", "pmap", "exact"))
    if loss is hardest_half:
        assert f"sort at {Path(__file__).name}:" in said


@pytest.mark.parametrize("loss", GATHER_WRONGLY)
def test_what_is_gathered_must_be_that_of_one_device(loss: Loss) -> None:
    with pytest.raises(rx.errors.LossError, match=r"gather|position"):
        step(loss, mode="shard_map")


@pytest.mark.parametrize("loss", only([contrastive], [*MEET, *MEAN_OTHERWISE, *ORDERED]))
def test_it_trains_where_it_sees_all_rows(loss: Loss) -> None:
    step(loss)
    step(loss, mode="single")
    step(loss, mode="shard_map", mesh=rx.make_mesh(1))


PADDED = only([contrastive], [contrastive, normalised, by_largest_weight])


@pytest.mark.parametrize("loss", PADDED)
def test_it_is_refused_where_padding_is_among_the_rows(loss: Loss) -> None:
    dp = rx.DataParallel(loss, optax.sgd(0.01))
    state = dp.init(MODEL)
    first, last = dp.feed(DATA, 12)
    with pytest.raises(rx.errors.LossError, match=r"4 of 16 rows .* padding.*rx\.row_weights"):
        dp.step(state, first)
    with pytest.raises(rx.errors.LossError, match=r"12 of 16 rows .* padding.*rx\.row_weights"):
        dp.step(state, last)
    with pytest.raises(rx.errors.LossError, match=r"rx\.row_weights"):
        dp.evaluate(state, [first])


@pytest.mark.parametrize("loss", PADDED)
def test_it_is_computed_without_padding_where_its_rows_divide(loss: Loss) -> None:
    dp = parallel(loss, optax.sgd(0.01))
    _, last = dp.feed(DATA, 12)
    _, metrics = dp.step(dp.init(MODEL), last)
    found = loss(MODEL, {name: leaf[12:] for name, leaf in DATA.items()}, None)
    values, weights = (
        (found.values, found.weights) if isinstance(found, rx.Weighted) else (found, None)
    )
    wanted = np.average(values, weights=weights)
    assert float(metrics["loss"]) == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize("arguments", only([DIVIDED[0]], DIVIDED))
@pytest.mark.parametrize("loss", STAY_APART)
def test_rows_that_stay_apart_are_trained_on_anywhere(
    loss: Loss, arguments: dict[str, Any]
) -> None:
    step(loss, **arguments)


def test_gathered_rows_with_padding_among_them_are_refused() -> None:
    def gathering(model: Any, batch: Any, key: Any) -> Any:
        return errors(model, batch, key) - jnp.mean(rx.gather(batch["x"]))

    with pytest.raises(rx.errors.LossError, match=r"rx\.row_weights"):
        step(gathering, mode="shard_map", rows=ROWS - 1)
    step(gathering, mode="shard_map")


@jax.custom_vjp
def centred_behind(rows: Any) -> Any:
    return rows


centred_behind.defvjp(lambda rows: (rows, None), lambda _, slope: (slope - jnp.mean(slope),))


def test_no_declaration_is_advised_where_gradients_of_rows_meet() -> None:
    def loss(model: Any, batch: Any, key: Any) -> Any:
        return centred_behind(errors(model, batch, key)) ** 2

    with pytest.raises(rx.errors.LossError, match="gradient") as caught:
        step(loss, mode="shard_map")
    assert "rx.independent" not in str(caught.value)


def test_a_key_that_is_the_same_on_every_replica_is_named() -> None:
    def noisy(model: Any, batch: Any, key: Any) -> Any:
        return errors(model, batch, key) * jax.random.normal(jax.random.key(3), (len(batch["x"]),))

    with pytest.raises(rx.errors.LossError, match=r"rx\.row_numbers"):
        step(noisy, mode="shard_map")


def test_a_key_of_the_state_that_a_loss_gets_is_another_on_every_replica() -> None:
    def noisy(model: Any, batch: Any, key: Any) -> Any:
        return jax.random.normal(key, (len(batch["x"]),)) * jnp.sum(model["w"])

    def own(state: Any, batch: Any, key: Any) -> Any:
        key, drawn_by = jax.random.split(state["key"])
        means, _, by_row = rx.value_and_grad(noisy, rows=True)(state, batch, drawn_by)
        return {**state, "key": key}, {**means, "all": rx.ByRow(by_row["loss"])}

    dp = parallel(step=own, mode="shard_map", devices=2)
    _, metrics = dp.step(dp.init({**MODEL, "key": jax.random.key(1)}), DATA)
    drawn = metrics["all"].whole().reshape(2, -1)
    assert not np.isclose(*drawn).any()


def rows_first(key: Any, rows: int) -> Any:
    return jax.random.normal(key, (rows, 4)).T


def one_key_for_each_sample(key: Any, rows: int) -> Any:
    return jax.vmap(lambda key: jax.random.normal(key, (rows,)))(jax.random.split(key, 4))


def rows_behind(key: Any, rows: int) -> Any:
    return jax.random.normal(key, (4, rows))


def first_by_a_key_of_its_own(key: Any, rows: int) -> Any:
    return jax.random.normal(jax.random.key(3), (rows, 4)).T


@pytest.mark.parametrize(
    "draw", [rows_first, one_key_for_each_sample, rows_behind, first_by_a_key_of_its_own]
)
def test_padding_changes_no_random_numbers_in_jit(draw: Any) -> None:
    def noisy(model: Any, batch: Any, key: Any) -> Any:
        return errors(model, batch, key) * draw(key, len(batch["x"])).mean(0)

    rows = {name: leaf[:13] for name, leaf in DATA.items()}
    found = []
    for devices in (1, 4):
        dp = parallel(noisy, optax.sgd(0.01), devices=devices)
        if devices > 1 and draw is rows_behind:
            with pytest.raises(rx.errors.LossError, match=r"\[\.\.\., rows\].*3 of 16 rows"):
                dp.step(dp.init(MODEL), rows)
        else:
            found.append(float(dp.step(dp.init(MODEL), rows)[1]["loss"]))
    assert found == pytest.approx(found[:1] * len(found), rel=1e-6)


def test_one_number_that_weighs_its_rows_may_be_padded() -> None:
    def weighing(model: Any, batch: Any, key: Any) -> Any:
        weights = rx.row_weights(batch)
        return jnp.sum(weights * errors(model, batch, key)) / jnp.sum(weights)

    dp = rx.DataParallel(weighing, optax.sgd(0.01))
    rows = {name: leaf[:13] for name, leaf in DATA.items()}
    _, metrics = dp.step(dp.init(MODEL), rows)
    expected = float(mean(MODEL, rows, None))
    assert float(metrics["loss"]) == pytest.approx(expected, rel=1e-6)


class LinenNorm(nn.Module):
    """Dense, BatchNorm, Dense."""

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        x = nn.BatchNorm(use_running_average=not train)(nn.Dense(8)(x))
        return nn.Dense(3)(x)


class NNXNorm(nnx.Module):
    """LinenNorm in NNX."""

    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.first, self.last = nnx.Linear(5, 8, rngs=rngs), nnx.Linear(8, 3, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)

    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        return self.last(self.norm(self.first(x)))


def linen_norm() -> Any:
    module = LinenNorm()
    return module.bind(module.init(jax.random.key(0), DATA["x"], False))


@pytest.mark.parametrize("model", [linen_norm, NNXNorm])
@pytest.mark.parametrize("arguments", only([DIVIDED[0]], DIVIDED))
def test_batch_norm_is_the_models_own_affair(model: Any, arguments: dict[str, Any]) -> None:
    def loss(model: Any, batch: Any, key: Any) -> Any:
        return jnp.mean((model(batch["x"], key is not None) - batch["y"]) ** 2, axis=1)

    step(loss, model(), **arguments)
