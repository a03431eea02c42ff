"""Rows that meet are refused, even if the numbers of a few batches do not show it."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.row_losses import DATA, MODEL, ROWS, Loss, error, output, stepped, stop
from support.tiers import only

import replicax as rx


@jax.custom_jvp
def sign(x: Any) -> Any:
    return jnp.sign(x)


@sign.defjvp
def _(primals: Any, tangents: Any) -> Any:
    """The tangent of each row is scaled by all rows."""
    return sign(*primals), tangents[0] * jnp.mean(jnp.abs(primals[0]))


@jax.custom_vjp
def clipped(x: Any) -> Any:
    return x


def _clip(_: Any, cotangent: Any) -> Any:
    return (cotangent / jnp.maximum(1, jnp.linalg.norm(cotangent)),)


clipped.defvjp(lambda x: (x, None), _clip)


def ignored_labels(model: Any, batch: Any, key: Any) -> Any:
    """Only later batches have ignored labels."""
    real = batch["label"] != -100
    return jnp.sum(error(model, batch) * real) / jnp.sum(real)


def missing_targets(model: Any, batch: Any, key: Any) -> Any:
    real = ~jnp.isnan(batch["y"][:, 0])
    return jnp.where(real, error(model, batch), 0) * len(real) / jnp.sum(real)


def straight_through(model: Any, batch: Any, key: Any) -> Any:
    soft = jax.nn.softmax(output(model, batch), axis=0)
    hard = jax.nn.one_hot(jnp.argmax(output(model, batch), 1), 3)
    return jnp.sum((hard + soft - stop(soft) - batch["y"]) ** 2, axis=1)


def a_gradient_alone(model: Any, batch: Any, key: Any) -> Any:
    spread = jnp.std(output(model, batch))
    return jnp.mean(error(model, batch)) + spread - stop(spread)


def in_half_precision(model: Any, batch: Any, key: Any) -> Any:
    weights = jnp.abs(batch["x"][:, 0]).astype(jnp.bfloat16)
    return jnp.sum(error(model, batch) * weights) / jnp.sum(weights)


def beside_a_large_one(model: Any, batch: Any, key: Any) -> Any:
    return 1e6 + error(model, batch) + 1e-3 * jnp.mean(output(model, batch)) ** 2


def hinge(model: Any, batch: Any, key: Any) -> Any:
    return error(model, batch) + jax.nn.relu(jnp.std(batch["x"]) - 50)


def skips_bad_batches(model: Any, batch: Any, key: Any) -> Any:
    found = error(model, batch)
    return jnp.where(jnp.mean(found) > 1e6, 0, found)


def every_eleventh(model: Any, batch: Any, key: Any) -> Any:
    y = jnp.roll(batch["y"], jnp.where(rx.step_number() % 11 == 6, 1, 0), axis=0)
    return error(model, {**batch, "y": y})


def labels_of_others(model: Any, batch: Any, key: Any) -> Any:
    now = rx.step_number() % 11 == 6
    label = jax.lax.cond(now, lambda each: each[::-1], lambda each: each, batch["label"])
    logits = output(model, batch)
    return optax.softmax_cross_entropy_with_integer_labels(logits, label)


def power_of_the_spread(model: Any, batch: Any, key: Any) -> Any:
    late = (rx.step_number() > 1000).astype(int)
    return error(model, batch) * jnp.std(batch["x"]) ** late


def derivative_of_others(model: Any, batch: Any, key: Any) -> Any:
    return jnp.sum((sign(output(model, batch)) - batch["y"]) ** 2, axis=1)


def clipped_gradient(model: Any, batch: Any, key: Any) -> Any:
    return jnp.sum((batch["x"] @ clipped(model["w"]) - batch["y"]) ** 2, axis=1)


def clipped_rows(model: Any, batch: Any, key: Any) -> Any:
    return jnp.sum((clipped(output(model, batch)) - batch["y"]) ** 2, axis=1)


def one_coefficient(model: Any, batch: Any, key: Any) -> Any:
    share = jax.random.beta(key, 1.0, 1.0)
    found = (batch["x"] * share) @ model["w"]
    return jnp.sum((found - rx.gather(found).mean(0)) ** 2, axis=1)


def first_half_twice(model: Any, batch: Any, key: Any) -> Any:
    found, half = error(model, batch), len(batch["x"]) // 2
    return jnp.concatenate([2 * found[:half], found[half:]])


def with_the_last(model: Any, batch: Any, key: Any) -> Any:
    found = error(model, batch)
    return found * found[::-1]


def scanned(model: Any, batch: Any, key: Any) -> Any:
    found = error(model, batch)
    mean = jax.lax.associative_scan(jnp.add, found)[-1] / len(found)
    return jnp.where(rx.step_number() % 11 == 6, mean + jnp.std(found), mean)


@jax.custom_vjp
def other_forward(x: Any) -> Any:
    return x


other_forward.defvjp(lambda x: (x * jnp.mean(x), None), lambda _, cotangent: (cotangent,))


@jax.custom_vjp
def decayed(w: Any) -> Any:
    return w


decayed.defvjp(lambda w: (w, w), lambda w, cotangent: (0.1 * w,))


@jax.custom_vjp
def pushed(w: Any) -> Any:
    return w


pushed.defvjp(lambda w: (w, None), lambda _, cotangent: (jnp.full((5, 3), 0.1),))


@jax.jit
def there_and_back(x: Any) -> Any:
    return jnp.tanh(x)[::-1]


def halves_of_two_calls(model: Any, batch: Any, key: Any) -> Any:
    half = len(batch["y"]) // 2
    one, other = there_and_back(output(model, batch)), there_and_back(batch["y"])
    return jnp.sum(jnp.concatenate([one[:half], other[half:]])[::-1] ** 2, axis=1)


def halves_of_two_iterations(model: Any, batch: Any, key: Any) -> Any:
    found, half = output(model, batch), len(batch["y"]) // 2
    one, two = jax.lax.map(lambda s: jnp.tanh(s * found)[::-1], jnp.array([1.0, 2.0]))
    return jnp.sum(jnp.concatenate([one[:half], two[half:]])[::-1] ** 2, axis=1)


def numbers_reversed_too(model: Any, batch: Any, key: Any) -> Any:
    both = jax.jit(lambda x: x[::-1][::-1])
    return both(error(model, batch)) * both(jnp.arange(len(batch["y"]), dtype=jnp.float32))


def reversed_in_a_while_loop_too(model: Any, batch: Any, key: Any) -> Any:
    both = jax.jit(lambda x: x[::-1][::-1])
    found = error(model, batch)
    less = lambda i_x: (i_x[0] + 1, both(i_x[1] - jnp.mean(i_x[1])))  # noqa: E731
    _, centred = jax.lax.while_loop(lambda i_x: i_x[0] < 1, less, (0, stop(found)))
    return both(found) * (1 + 0.1 * centred)


def halves_of_two_dtypes(model: Any, batch: Any, key: Any) -> Any:
    found, half = 3 * output(model, batch)[::-1], len(batch["y"]) // 2
    dtypes = [found.astype(dtype).astype(jnp.float32) for dtype in (jnp.bfloat16, jnp.int32)]
    return jnp.sum(jnp.concatenate([dtypes[0][:half], dtypes[1][half:]])[::-1] ** 2, axis=1)


def another_axis(model: Any, batch: Any, key: Any) -> Any:
    x = jax.lax.rev(batch["x"], (1,) if len(batch["x"]) >= ROWS else (0,))
    return error(model, {**batch, "x": x})


def whole_eights(model: Any, batch: Any, key: Any) -> Any:
    found = error(model, batch)
    kept = jax.lax.dynamic_slice_in_dim(found, 0, max(len(found) // 8 * 8, 3))
    return jnp.sum(kept) / len(found)


def forward_of_others(model: Any, batch: Any, key: Any) -> Any:
    return jnp.sum((other_forward(output(model, batch)) - batch["y"]) ** 2, axis=1)


def decay_for_each_part(model: Any, batch: Any, key: Any) -> Any:
    return error({"w": decayed(model["w"])}, batch)


def push_for_each_part(model: Any, batch: Any, key: Any) -> Any:
    return error({"w": pushed(model["w"])}, batch)


def column_by_number(model: Any, batch: Any, key: Any) -> Any:
    count = len(batch["x"])
    places = jnp.arange(count), jnp.full(count, count // 4, jnp.int32)
    picked = batch["x"].at[places].get(mode="promise_in_bounds", wrap_negative_indices=False)
    return error(model, batch) * picked**2


MEET = [
    *(straight_through, every_eleventh, a_gradient_alone, derivative_of_others, hinge),
    *(ignored_labels, missing_targets, in_half_precision, beside_a_large_one, skips_bad_batches),
    *(labels_of_others, power_of_the_spread, clipped_gradient, clipped_rows, one_coefficient),
    *(
        with_the_last,
        scanned,
        numbers_reversed_too,
        reversed_in_a_while_loop_too,
        another_axis,
        forward_of_others,
    ),
    *(decay_for_each_part, push_for_each_part, column_by_number),
]
IN_BLOCKS = [
    whole_eights,
    first_half_twice,
    halves_of_two_calls,
    halves_of_two_iterations,
    halves_of_two_dtypes,
]


@pytest.mark.parametrize(
    "settings", only([{"mode": "shard_map"}], [{"mode": "shard_map"}, {"accumulate": 2}])
)
@pytest.mark.parametrize("loss", MEET)
def test_rows_that_meet_are_refused(loss: Loss, settings: dict[str, Any]) -> None:
    with pytest.raises(rx.errors.LossError):
        stepped(loss, **settings)


@pytest.mark.parametrize("metric", [False, True])
@pytest.mark.parametrize("settings", [{"mode": "shard_map"}, {"accumulate": 2}, {"padded": True}])
def test_a_value_for_each_pair_of_rows_is_named_by_its_shape(
    settings: dict[str, Any], metric: bool
) -> None:
    def loss(model: Any, batch: Any, key: Any) -> Any:
        each = output(model, batch).sum(1)
        pairs = each - each[:, None]
        return (each, {"gap": pairs}) if metric else pairs

    settings = dict(settings)
    dp = rx.DataParallel(loss, optax.sgd(0.1), **({} if settings.pop("padded", 0) else settings))
    rows = jax.tree.map(lambda leaf: leaf[: len(leaf) - (not settings)], DATA)
    size = len(jax.tree.leaves(DATA)[0])
    named = "gap" if metric else "the loss"
    with pytest.raises(rx.errors.LossError, match=rf"{named} .*\[{size}, {size}\].*\[{size}, 1\]"):
        dp.step(dp.init(MODEL), rows)


@pytest.mark.parametrize("loss", IN_BLOCKS)
def test_blocks_of_rows_are_refused_where_their_places_count(loss: Loss) -> None:
    with pytest.raises(rx.errors.LossError, match=r"replicas\b"):
        stepped(loss, mode="shard_map")


def test_micro_batches_have_the_halves_of_the_batch() -> None:
    found = stepped(first_half_twice, accumulate=2)
    np.testing.assert_allclose(found["w"], stepped(first_half_twice)["w"], 1e-5, 1e-6)
