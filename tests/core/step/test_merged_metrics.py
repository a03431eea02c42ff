"""Metrics that are no means: of all rows, in every mode, with padding, and what is refused."""

from functools import partial
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from support import training
from support.counted_metrics import F1, MODEL, by_the_book, loss, rows, values
from support.tiers import EXHAUSTIVE, exhaustive, only

import replicax as rx
from replicax.core.data.merged import Merging

BATCH = 32
PEERS = "no clu or metrax: `make peers` installs them"
MODES: list[Any] = [
    (mode, devices, accumulate, layout)
    for mode, devices, accumulate in [
        ("shard_map", 4, 2),
        ("jit", 4, 1),
        ("single", 1, 1),
        ("jit", 2, 2),
        ("pmap", 4, 1),
        ("exact", 4, 1),
        ("exact", 1, 1),
    ]
    for layout in ("replicated", *(["fsdp", "zero1"] if devices == 4 and mode != "pmap" else []))
    if (mode, layout) != ("exact", "fsdp")
]


parallel = partial(training.parallel, mode="shard_map")


def of_one(metric: Any, source: Any = None, mode: str = "shard_map", **more: Any) -> Any:
    """Return what a metric of scores and labels computes on all rows."""

    def with_metric(model: Any, batch: Any, key: Any) -> Any:
        score, label = batch["x"] @ model["w"], batch["label"]
        return score**2, {"m": metric(score, label)}

    dp = parallel(with_metric, optax.sgd(0.0), mode=mode, **more)
    found = dp.evaluate(dp.init(MODEL), dp.feed(source or rows(), BATCH))
    return {name: value for name, value in found.items() if name not in ("loss", "rows")}


def assert_close(found: dict[str, Any], expected: dict[str, float]) -> None:
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=2e-6, err_msg=name)
    assert found["f1"] == expected["f1"]


@pytest.mark.promise("home.metrics-that-are-no-means")
@pytest.mark.parametrize(
    ("mode", "devices", "accumulate", "layout"),
    only([MODES[0], ("exact", 4, 1, "replicated")], MODES),
)
def test_they_are_those_of_all_rows(mode: str, devices: int, accumulate: int, layout: str) -> None:
    settings = {"mode": mode, "devices": devices, "accumulate": accumulate, "layout": layout}
    dp = parallel(loss, optax.sgd(0.0), **settings)
    state = dp.init(MODEL)
    assert_close(dp.evaluate(state, dp.feed(rows(), BATCH)), by_the_book())
    [batch] = dp.feed(rows(), 96)
    _, metrics = dp.step(state, batch)
    assert_close(values(metrics), by_the_book())


def test_so_they_are_in_a_step_of_ones_own() -> None:
    def step(state: Any, batch: Any, key: Any) -> Any:
        means, _ = rx.value_and_grad(loss)(state, batch, key)
        score = batch["x"] @ state["w"]
        return state, {**means, "own": F1.of(score, batch["label"], rx.row_weights(score))}

    dp = parallel(step=step, accumulate=2)
    [batch] = dp.feed(rows(), 96)
    _, metrics = dp.step(dp.init(MODEL), batch)
    assert_close(values(metrics), by_the_book())
    assert float(metrics["own"]) == by_the_book()["f1"]


def test_a_function_of_all_rows_gets_them_in_their_order() -> None:
    order = rows()["x"] @ MODEL["w"]

    def differs(score: np.ndarray) -> Any:
        return np.abs(score - order).max()

    found = of_one(lambda score, label: rx.HostMetric(differs, score), devices=2, accumulate=2)
    assert found["m"] < 1e-5


def test_several_steps_have_one_each_and_one_of_all() -> None:
    dp = parallel(loss, optax.sgd(0.0))
    halves = [{name: each[n : n + 32] for name, each in rows().items()} for n in (0, 32)]
    _, metrics = dp.steps(dp.init(MODEL), halves)
    assert float(metrics["f1"]) == by_the_book(64)["f1"]
    assert metrics["auc"].compute() == by_the_book(64)["auc"]
    assert float(metrics["f1"][0]) == by_the_book(32)["f1"]
    assert metrics["auc"][0].compute() == by_the_book(32)["auc"]
    with pytest.raises(TypeError, match="f1"):
        metrics["f1"][0][0]


@pytest.mark.parametrize(
    "unmasked",
    [
        lambda score, label: F1.of(score, label, 1.0),
        lambda score, label: F1(jnp.sum(rx.row_weights(score) * score), len(score)),
        exhaustive(lambda score, label: F1(jnp.sum(rx.row_weights(score) * score), jnp.sum(score))),
    ],
    ids=["all", "a constant", "one of two"],
)
def test_one_that_counts_padding_is_refused(unmasked: Any) -> None:
    with pytest.raises(
        rx.errors.LossError, match=r"'m'.* 13 of 32 .*rx\.row_weights.*rx\.HostMetric"
    ):
        of_one(unmasked)


def test_or_computed_without_padding(caplog: pytest.LogCaptureFixture) -> None:
    found = of_one(lambda score, label: F1.of(score, label, 1.0), rows(80), devices=4)
    assert found["m"] == by_the_book(80)["f1"]
    assert "16 rows" in caplog.text


class NoTree:
    """No pytree."""

    def merge(self, other: Any) -> Any:
        return self

    def compute(self) -> float:
        return 0.0


@flax.struct.dataclass
class Unmergeable(NoTree):
    """A pytree whose `merge` fails."""

    size: jax.Array

    def merge(self, other: Any) -> Any:
        return self.missing + other.size  # type: ignore[attr-defined]


class Median(nnx.Metric):
    """A metric of NNX with a state of its own, and no `merge`."""

    def __init__(self, values: Any) -> None:
        self.values = nnx.metrics.MetricState(values)


@pytest.mark.parametrize(
    ("metric", "says"),
    [
        (lambda score, label: NoTree(), "NoTree"),
        (lambda score, label: Unmergeable(jnp.sum(score)), "missing"),
        (lambda score, label: Median(jnp.sum(score)), "Median"),
        (lambda score, label: rx.HostMetric(np.mean, jnp.repeat(score, 2)), r"\[64\].* 32 rows"),
    ],
    ids=["no pytree", "merge fails", "no merge", "other rows"],
)
def test_what_cannot_be_merged_is_refused(metric: Any, says: str) -> None:
    with pytest.raises(rx.errors.LossError, match=says):
        of_one(metric, mode="single", devices=1)


def test_stages_and_islands_refuse_them() -> None:
    dp = rx.DataParallel(loss, optax.sgd(0.1), rounds=rx.Rounds(every=2))
    with pytest.raises(rx.errors.ConfigError, match="islands"):
        dp.step(dp.init(MODEL), rows(64))


def test_welford_has_the_deviation_of_all_rows() -> None:
    def welford(score: Any, label: Any) -> Any:
        metric = nnx.metrics.Welford()
        metric.update(values=score)
        return metric

    found, score = of_one(welford, rows(64), devices=4), rows(64)["x"] @ MODEL["w"]
    assert sorted(found) == ["m/mean", "m/standard_deviation", "m/standard_error_of_mean"]
    np.testing.assert_allclose(found["m/mean"], score.mean(), rtol=1e-5)
    np.testing.assert_allclose(found["m/standard_deviation"], score.std(), rtol=1e-5)


def test_counts_do_not_end_where_float32_does() -> None:
    dp = parallel(
        lambda model, batch, key: (batch["x"] @ model["w"], {"f1": F1.of(0.0, True, 2.0**24)}),
        optax.sgd(0.0),
        mode="single",
        devices=1,
    )
    _, metrics = dp.step(dp.init(MODEL), rows(32))
    total = Merging()
    for _ in range(3):
        total.add(metrics["f1"])
    assert metrics["f1"].metric.wrong == 2**24
    assert total.save_state() == [["float64", 0.0], ["float64", 3 * 2.0**24]]


@EXHAUSTIVE
@pytest.mark.parametrize("mode", ["jit", "shard_map"])
def test_metrics_of_clu_and_metrax(mode: str) -> None:
    metrax = pytest.importorskip("metrax", reason=PEERS)
    metrax_nnx = pytest.importorskip("metrax.nnx", reason=PEERS)
    clu = pytest.importorskip("clu.metrics", reason=PEERS)

    def area(score: Any, label: Any) -> Any:
        metric = metrax_nnx.AUCROC()
        real = rx.row_weights(score)
        metric.update(predictions=jax.nn.sigmoid(score), labels=label, sample_weights=real)
        return metric

    @flax.struct.dataclass
    class Collected(clu.CollectingMetric.from_outputs(("score", "label"))):  # type: ignore[misc]
        """The size of the scores, collected."""

        def compute(self) -> Any:
            return np.mean(np.abs(super().compute()["score"]))

    book = by_the_book()
    near = of_one(area, mode=mode)["m"]  # of 200 thresholds
    assert abs(near - book["auc"]) < 0.01
    chance = of_one(
        lambda score, label: metrax.AUCROC.from_model_output(
            jax.nn.sigmoid(score), label, sample_weights=rx.row_weights(score)
        ),
        mode=mode,
    )
    assert chance["m"] == near
    collected = of_one(lambda s, y: Collected.from_model_output(score=s, label=y), mode=mode)
    np.testing.assert_allclose(collected["m"], book["size"], rtol=1e-6)
    with pytest.raises(rx.errors.LossError, match="row_weights"):  # it takes no mask
        of_one(lambda s, y: metrax.Precision.from_model_output(s, y, threshold=0.0), mode=mode)


def test_values_are_those_of_scikit_learn() -> None:
    sk = pytest.importorskip("sklearn.metrics", reason="no scikit-learn: `make peers` installs it")
    x, label = rows().values()
    score = np.float64(x @ MODEL["w"])
    book = by_the_book()
    assert book["auc"] == pytest.approx(sk.roc_auc_score(label, score), rel=1e-12)
    assert book["f1"] == pytest.approx(sk.f1_score(label, score > 0), rel=1e-12)
    nats = sk.log_loss(label, 1 / (1 + np.exp(-score)))
    assert np.exp(book["loss"]) == pytest.approx(np.exp(nats), rel=1e-6)
