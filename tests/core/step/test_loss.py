"""The loss contract: allowed return values, their meaning, and errors."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.tiers import only
from support.training import parallel

import replicax as rx
from replicax.core.step.loss import Totals, rows_counted, sums

ROWS = 6
MASK = jnp.asarray([1, 1, 1, 1, 0, 0], jnp.float32)
VALUES = np.arange(1, 7, dtype=np.float32)


def mean(returned: Any, name: str = "loss", mask: jax.Array = MASK) -> float:
    return float(sums(returned, mask)[name].mean())


@pytest.mark.promise("parity.weighted-rows")
@pytest.mark.parametrize("weights", [[1.0, 0, 2, 0, 5, 5], [[1.0], [0], [2], [0], [5], [5]]])
def test_weights_are_divided_by_their_sum(weights: Any) -> None:
    weights = jnp.asarray(weights)
    values = jnp.asarray(VALUES).reshape(weights.shape)
    assert mean(rx.Weighted(values, weights)) == pytest.approx((1 * 1 + 3 * 2) / 3)


def test_weights_of_rows_spread_over_their_entries() -> None:
    values = jnp.asarray(np.stack([VALUES, 3 * VALUES], axis=1))
    assert mean(values) == pytest.approx(5.0)
    assert mean(rx.Weighted(values, jnp.asarray([1.0, 0, 0, 1, 1, 1]))) == pytest.approx(5.0)


def test_an_entry_of_weight_zero_may_be_anything() -> None:
    values = jnp.asarray([1.0, jnp.nan, 3.0, jnp.inf, jnp.nan, jnp.nan])
    assert mean(rx.Weighted(values, jnp.asarray([1.0, 0, 1, 0, 1, 1]))) == pytest.approx(2.0)


def test_no_gradient_flows_through_weights() -> None:
    def total(weight: jax.Array) -> jax.Array:
        values = rx.Weighted(jnp.asarray(VALUES), weight * jnp.ones(ROWS))
        return sums(values, MASK)["loss"].total

    assert jax.grad(total)(jnp.float32(2.0)) == 0.0


def test_low_precision_is_summed_in_float32() -> None:
    found = sums(jnp.ones(4096, jnp.bfloat16) * 1.0078125, jnp.ones(4096))["loss"]
    assert found.total.dtype == jnp.float32
    assert float(found.total) == 4096 * 1.0078125


@pytest.mark.parametrize(
    ("returned", "says"),
    [
        (jnp.arange(ROWS), "dtype int32"),
        (jnp.asarray(VALUES) + 0j, "dtype complex64"),
        (jnp.ones(ROWS + 1), f"shape (7,) and the batch has {ROWS} rows"),
        (jnp.ones((1, ROWS)), f"shape (1, 6) and the batch has {ROWS} rows"),
        ((jnp.ones(ROWS), jnp.ones(ROWS)), "a tuple of"),
        ((jnp.ones(ROWS), {"loss": jnp.ones(ROWS)}), "'loss', a reserved"),
        ((jnp.ones(ROWS), {"rows": jnp.ones(ROWS)}), "'rows', a reserved"),
        ((jnp.ones(ROWS), {1: jnp.ones(ROWS)}), "the key 1;"),
        (None, "a NoneType"),
        ("0.5", "a str"),
        (
            rx.Weighted(jnp.ones(ROWS), jnp.ones(3)),
            "values of shape (6,) and weights of shape (3,)",
        ),
        (rx.Weighted(jnp.ones(()), jnp.ones(())), "contains a scalar"),
        ((jnp.ones(ROWS), {"m": jnp.ones(3)}), "m has shape (3,)"),
    ],
)
def test_refuses_in_one_line(returned: Any, says: str) -> None:
    with pytest.raises(rx.errors.LossError) as caught:
        sums(returned, MASK)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def scalar_loss(model: Any, batch: Any, key: Any) -> jax.Array:
    return jnp.mean((model["w"] * batch["x"]) ** 2)


SOURCE = {"x": np.arange(1, 11, dtype=np.float32)}
MODEL = {"w": jnp.float32(2.0)}


@pytest.mark.parametrize("mode", ["single", "jit", "shard_map", "pmap"])
@pytest.mark.parametrize("accumulate", only([2], [1, 2]))
def test_a_scalar_loss_is_exact_on_full_batches(mode: str, accumulate: int) -> None:
    dp = parallel(scalar_loss, optax.sgd(0.1), mode=mode, accumulate=accumulate)
    state = dp.init(MODEL)
    source = {"x": np.arange(1, 17, dtype=np.float32)}
    (batch,) = dp.feed(source, 16)
    _, metrics = dp.step(state, batch)
    np.testing.assert_allclose(metrics["loss"], np.mean((2 * source["x"]) ** 2), rtol=1e-6)


@pytest.mark.parametrize("devices", [1, 4])
def test_a_short_batch_of_a_scalar_loss_is_refused_or_not_padded(devices: int) -> None:
    dp = parallel(scalar_loss, optax.sgd(0.1), devices=devices, donate=False)
    state = dp.init(MODEL)
    first, *_, last = dp.feed(SOURCE, 4)
    if devices == 1:
        _, metrics = dp.step(state, last)
        rows = {name: leaf[-2:] for name, leaf in SOURCE.items()}
        assert float(metrics["loss"]) == pytest.approx(float(scalar_loss(MODEL, rows, None)))
        return
    with pytest.raises(rx.errors.LossError, match=r"2 of 4 rows .* padding"):
        dp.step(state, first)  # before the padded batch comes


def test_a_scalar_loss_is_refused_on_a_padded_batch_of_unknown_length() -> None:
    dp = parallel(scalar_loss, optax.sgd(0.1))
    state = dp.init(MODEL)
    full, short = dp.feed([{"x": SOURCE["x"][:4]}, {"x": SOURCE["x"][:3]}])
    state, _ = dp.step(state, full)
    with pytest.raises(rx.errors.LossError, match=r"1 of 4 rows .* padding"):
        dp.step(state, short)


def test_a_scalar_metric_is_refused_in_evaluation_with_padding() -> None:
    def loss(model: Any, batch: Any, key: Any) -> Any:
        values = model["w"] * batch["x"]
        return values, {"largest": jnp.max(values)}

    dp = parallel(loss, optax.sgd(0.1))
    with pytest.raises(rx.errors.LossError, match=r"\blargest\b.*\bone number"):
        dp.evaluate(dp.init(MODEL), dp.feed(SOURCE, 4))


@pytest.mark.parametrize("value", [jnp.nan, jnp.inf])
def test_a_loss_that_is_not_finite_at_the_start_is_refused(value: float) -> None:
    dp = rx.DataParallel(lambda m, b, k: m["w"] * b["x"] * value, optax.sgd(0.1), mode="single")
    with pytest.raises(rx.errors.LossError, match="first step"):
        dp.step(dp.init(MODEL), SOURCE)


def test_metrics_that_no_row_can_change_may_be_padded() -> None:
    def loss(model: Any, batch: Any, key: Any) -> Any:
        norm = jnp.sqrt(jnp.sum(model["w"] ** 2))
        rate = 0.5 / (1.0 + rx.step_number())
        return model["w"] * batch["x"], {"number": 3.0, "norm": norm, "rate": rate}

    dp = parallel(loss, optax.sgd(0.0))
    state, metrics = dp.step(dp.init(MODEL), {"x": SOURCE["x"][:7]})
    found = dp.evaluate(state, dp.feed(SOURCE, 4))
    assert [float(metrics[name]) for name in ("number", "norm", "rate")] == [3.0, 2.0, 0.5]
    assert [found[name] for name in ("number", "norm", "rate")] == [3.0, 2.0, 0.25]


LEARNED = {"w": jnp.float32(2.0), "v": jnp.float32(1.0)}


def learned(stops: bool = False, by_hand: bool = False) -> Any:
    """A loss whose weights depend on the parameter `v`."""

    def loss(model: Any, batch: Any, key: Any) -> Any:
        weights = jax.nn.sigmoid(model["v"] * batch["x"])
        if by_hand:
            return model["w"] * batch["x"] * weights / rx.gather(weights).mean()
        weights = jax.lax.stop_gradient(weights) if stops else weights
        return rx.Weighted(model["w"] * batch["x"], weights), {
            "x": rx.Weighted(batch["x"], weights)
        }

    return loss


@pytest.mark.promise("outside.learned-weights")
@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("mode", only(["shard_map"], ["jit", "shard_map", "exact"]))
def test_weights_that_are_learned_are_refused(mode: str, own: bool) -> None:
    def trained(loss: Any, **options: Any) -> Any:
        def step(state: Any, batch: Any, key: Any) -> Any:
            means, gradient = rx.value_and_grad(loss)(state, batch, key)
            return jax.tree.map(jnp.subtract, state, gradient), means

        given = {"step": step} if own else {"loss": loss, "optimizer": optax.sgd(1.0)}
        dp = parallel(mode=mode, devices=2, **given, **options)
        return dp.model(dp.step(dp.init(LEARNED), {"x": SOURCE["x"][:8]})[0])

    with pytest.raises(rx.errors.LossError, match=r"\bweights\b.*stop_gradient"):
        trained(learned())
    assert trained(learned(stops=True))["v"] == 1.0
    if not own:
        assert trained(learned(), trainable=lambda path: "v" not in path)["v"] == 1.0
    plain = jax.grad(
        lambda model: learned(by_hand=True)(model, {"x": SOURCE["x"][:8]}, None).mean()
    )
    moved = LEARNED["v"] - plain(LEARNED)["v"]
    assert trained(learned(by_hand=True))["v"] == pytest.approx(float(moved), rel=1e-5)


def test_rows_are_counted_beyond_what_float32_counts() -> None:
    totals = Totals()
    of_few = rows_counted(np.ones(2**11 + 1, bool))
    for found in (of_few, jax.tree.map(lambda part: part * np.float32(2**13), of_few)):
        totals.add({"rows": found})
    assert totals.means() == {"rows": (2**11 + 1) * (2**13 + 1)}
