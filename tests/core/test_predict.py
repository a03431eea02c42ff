"""Predictions for all rows of a feed, in order; evaluation of several feeds, and of any loss."""

import dataclasses
import functools
from collections import UserDict
from collections.abc import Callable, Iterator
from typing import Any

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support import training
from support.tiers import only
from support.training import normals, slices

import replicax as rx
from replicax.core.evaluation import ProgramEvaluation

ROWS, BATCH = 52, 32
PLACES = [
    ("single", 1, "replicated"),
    ("jit", 4, "replicated"),
    ("jit", 4, "fsdp"),
    ("jit", 4, "zero1"),
    ("shard_map", 4, "replicated"),
    ("pmap", 4, "replicated"),
    ("exact", 4, "replicated"),
]
KEPT = [("jit", 4, "fsdp"), ("shard_map", 4, "replicated")]
places = pytest.mark.parametrize(("mode", "devices", "layout"), only(KEPT, PLACES))
draw = normals(0)
DATA = {"x": draw(ROWS, 4), "y": draw(ROWS), "number": np.arange(ROWS, dtype=np.int32)}
MODEL = {"w": jnp.asarray(draw(4, 8)), "b": jnp.ones(8)}


def loss(model: Any, batch: Any, key: Any) -> Any:
    return (jnp.sum(batch["x"] @ model["w"] + model["b"], -1) - batch["y"]) ** 2


def several(model: Any, batch: Any, key: Any) -> Any:
    found = jnp.tanh(batch["x"] @ model["w"] + model["b"])
    both = found[:, 0], found.astype(jnp.bfloat16)
    return {"found": found, "both": both, "number": batch["number"], "positive": found > 0}


@functools.cache
def parallel(
    mode: str = "shard_map", devices: int = 4, layout: str = "replicated", **settings: Any
) -> rx.DataParallel:
    given = {"loss": loss, "optimizer": optax.sgd(0.1), "layout": layout, **settings}
    return training.parallel(mode=mode, devices=devices, **given)


def predicted(function: Any, dp: rx.DataParallel, model: Any = MODEL, **options: Any) -> Any:
    return dp.predict(dp.init(model), dp.feed(DATA, BATCH), function, **options)


def near(found: Any, wanted: Any) -> None:
    def check(one: np.ndarray, other: Any) -> None:
        assert type(one) is np.ndarray
        assert one.dtype == other.dtype
        bound = 1e-2 if one.dtype == jnp.bfloat16 else 1e-5
        kind = np.float32 if one.dtype == jnp.bfloat16 else one.dtype
        np.testing.assert_allclose(one.astype(kind), other.astype(kind), rtol=bound, atol=bound)

    jax.tree.map(check, found, wanted)


@places
def test_all_rows_in_order(mode: str, devices: int, layout: str) -> None:
    wanted, dp = several(MODEL, DATA, None), parallel(mode, devices, layout)
    near(predicted(several, dp), wanted)
    near(predicted(lambda model, batch: several(model, batch, None)["found"], dp), wanted["found"])


def test_results_leave_the_devices_while_later_batches_come(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    dp, order, leaves = parallel(), list[str](), ProgramEvaluation._on_host

    def watched(self: ProgramEvaluation, leaf: jax.Array) -> np.ndarray:
        order.append("out")
        return leaves(self, leaf)

    def batches() -> Iterator[Any]:
        for batch in [*dp.feed(DATA, BATCH)] * 3:
            order.append("in")
            yield batch

    monkeypatch.setattr(ProgramEvaluation, "_on_host", watched)
    assert len(dp.predict(dp.init(MODEL), batches(), several)["found"]) == 3 * ROWS
    assert (order.index("out"), order.count("in")) == (3, 6)  # two may wait


def test_a_function_may_gather() -> None:
    def centred(model: Any, batch: Any, key: Any) -> Any:
        x, real = rx.gather((batch["x"], rx.row_weights(batch["x"])))
        return batch["x"] - jnp.sum(x * real[:, None], 0) / jnp.sum(real)

    x = DATA["x"]
    wanted = np.concatenate([part - part.mean(0) for part in (x[:BATCH], x[BATCH:])])
    near(predicted(centred, parallel()), wanted)
    near(predicted(centred, parallel("jit")), wanted)


def test_the_average_of_the_parameters() -> None:
    dp = parallel(ema=0.5)
    state, _ = training.train(dp, MODEL, dp.feed(DATA, BATCH))
    for ema in (False, True):
        found = dp.predict(state, dp.feed(DATA, BATCH), several, ema=ema)
        near(found["found"], several(dp.model(state, ema=ema), DATA, None)["found"])


def test_a_mapping_is_a_batch_and_a_mapping_of_batches() -> None:
    dp, cut = parallel(), {name: leaf[:16] for name, leaf in DATA.items()}
    state = dp.init(MODEL)
    wanted = dp.predict(state, [cut], several)["found"]
    np.testing.assert_array_equal(dp.predict(state, [UserDict(cut)], several)["found"], wanted)
    found = dp.predict(state, UserDict(cut), lambda model, batch: several(model, batch, None))
    np.testing.assert_array_equal(found["found"], wanted)
    named = dp.evaluate(state, UserDict(a=[cut], b=[UserDict(cut)]))
    assert named["a"] == named["b"]
    squares = dp.evaluate(state, {"a": [cut]}, loss=lambda m, b, k: b["y"] ** 2)
    assert squares["a"]["loss"] == pytest.approx(np.mean(cut["y"] ** 2), rel=1e-5)
    assert float(dp.step(state, UserDict(cut))[1]["loss"]) == pytest.approx(named["a"]["loss"])


def test_hand_made_batches_and_a_function_that_is_traced_once() -> None:
    traces = []

    def counted(model: Any, batch: Any, key: Any) -> Any:
        traces.append(batch["x"].shape)
        return batch["number"], model["b"] * batch["x"][:, :1]

    dp = parallel()
    state = dp.init(MODEL)
    cut = lambda *at: {name: leaf[slice(*at)] for name, leaf in DATA.items()}  # noqa: E731
    parts = [cut(0, 8), cut(8, 15), cut(15, 19)]  # 8 rows, 7 padded to 8, and 4
    counts = []
    for _ in range(2):
        number, scaled = dp.predict(state, parts, counted)
        np.testing.assert_array_equal(number, np.arange(19))
        near(scaled, DATA["x"][:19, :1] * np.ones(8, np.float32))
        counts.append(len(traces))
    assert counts[0] == counts[1], "nothing is traced again"


def softmax(model: Any, batch: Any, key: Any) -> Any:
    return jax.nn.softmax(batch["x"][:, 0])


def rank(model: Any, batch: Any, key: Any) -> Any:
    return {"rank": jnp.argsort(jnp.argsort(batch["y"]))}


@pytest.mark.parametrize("function", [softmax, rank])
def test_rows_that_mix_are_refused_where_not_all_are_seen(function: Any) -> None:
    for dp, rows in ((parallel(), 32), (parallel("jit", 4), 33)):
        batches = dp.feed({name: leaf[:rows] for name, leaf in DATA.items()}, 16)
        with pytest.raises(rx.errors.LossError, match="prediction"):
            dp.predict(dp.init(MODEL), batches, function)
    one = parallel("jit", 1)
    found = one.predict(one.init(MODEL), one.feed(DATA, 16), function)  # 4 of 16 rows at the end
    expected = [function(None, batch, None) for batch in slices(DATA, 16)]
    jax.tree.map(near, found, jax.tree.map(lambda *leaves: np.concatenate(leaves), *expected))


def test_rows_of_different_shapes_are_refused_by_name() -> None:
    dp = parallel(devices=1)
    batches = [{"x": np.ones((3, width), np.float32)} for width in (4, 5)]
    for function, words in (
        (lambda m, b, k: {"a": b["x"]}, [r"\['a'\]", r"\[4\]", r"\[5\]"]),
        (lambda m, b, k: {str(b["x"].shape[1]): b["x"][:, 0]}, [r"\['4'\]", "missing"]),
    ):
        with pytest.raises(rx.errors.LossError, match=".*".join(words)):
            dp.predict(dp.init(MODEL), batches, function)


def drawn(model: Any, batch: Any, key: Any) -> Any:
    return jax.random.normal(key, (len(batch["y"]),))


@pytest.mark.parametrize("mode", only(["shard_map"], ["jit", "shard_map", "pmap"]))
@pytest.mark.parametrize(
    ("function", "said"),
    [
        (lambda m, b, k: jnp.mean(b["y"]), "predict returned"),
        (lambda m, b, k: {"a": b["y"], "mean": jnp.mean(b["y"])}, "predict returned"),
        (lambda m, b, k: b["y"][:3], "predict returned"),
        (lambda m, b, k: {"all": b["y"], "some": b["y"][:3]}, "predict returned"),
        (lambda m, b, k: "text", "predict returned"),
        (lambda m, b, k: None, "predict returned"),
    ],
)
def test_what_is_no_prediction(function: Any, said: str, mode: str) -> None:
    with pytest.raises(rx.errors.LossError, match=said) as caught:
        predicted(function, parallel(mode))
    assert "\n" not in str(caught.value)


def test_what_cannot_be_predicted_with() -> None:
    dp, feed = parallel(), parallel().feed(DATA, BATCH)
    with pytest.raises(rx.errors.StateError, match="init"):
        dp.predict(None, feed, several)  # type: ignore[arg-type]
    state = dp.init(MODEL)
    with pytest.raises(rx.errors.ConfigError, match=r"^predict .*0 batches"):
        dp.predict(state, [], several)
    with pytest.raises(rx.errors.ConfigError, match=r"predict\(state, source"):
        dp.predict(state, feed, "several")  # type: ignore[arg-type]
    with pytest.raises(rx.errors.StateError, match=r"state\b.*\bdict\b"):
        dp.predict(MODEL, feed, several)  # type: ignore[arg-type]
    with pytest.raises(rx.errors.ConfigError, match=r"1 sources \(all\)"):
        dp.predict(state, {"all": feed}, several)


@pytest.mark.parametrize("ema", [False, True])
def test_a_state_that_a_step_consumed(ema: bool) -> None:
    dp = parallel(ema=0.5)
    state = dp.init(MODEL)
    dp.step(state, next(iter(dp.feed(DATA, BATCH))))
    with pytest.raises(rx.errors.StateError, match="donate"):
        dp.predict(state, dp.feed(DATA, BATCH), several, ema=ema)
    with pytest.raises(rx.errors.StateError, match="donate"):
        dp.evaluate(state, dp.feed(DATA, BATCH), ema=ema)


# Evaluation.


class Loader:
    """Batches that can be read again, of 13 rows each."""

    def __iter__(self) -> Iterator[Any]:
        return iter(slices(DATA, 13))


def grain_rows() -> Any:
    rows = [{name: leaf[at] for name, leaf in DATA.items()} for at in range(ROWS)]
    return grain.MapDataset.source(rows)


SOURCES: dict[str, tuple[Callable[[Any], Any], dict[str, Any]]] = {
    "rows": (lambda dp: DATA, {}),
    "rows that are cut": (lambda dp: DATA, {"batch_size": 16}),
    "own rows": (lambda dp: rx.ProcessLocal(DATA), {"batch_size": 16}),
    "mapping": (lambda dp: UserDict(DATA), {"batch_size": 16}),
    "grain": (lambda dp: grain_rows(), {"batch_size": 16}),
    "loader": (lambda dp: Loader(), {}),
    "loader that is padded": (lambda dp: Loader(), {"batch_size": 16}),
    "list": (lambda dp: list(Loader()), {}),
    "generator": (lambda dp: iter(Loader()), {}),
    "feed": (lambda dp: dp.feed(DATA, BATCH), {}),
    "a batch": (lambda dp: next(iter(dp.feed(DATA, ROWS))), {}),
}


def test_evaluation_and_prediction_take_what_a_feed_takes() -> None:
    dp = parallel()
    state = dp.init(MODEL)
    wanted = np.asarray(several(MODEL, DATA, None)["found"])
    mean = float(jnp.mean(loss(MODEL, DATA, None)))
    for name, (source, given) in SOURCES.items():
        found = dp.evaluate(state, source(dp), **given)
        assert (found["rows"], found["loss"]) == (ROWS, pytest.approx(mean, rel=1e-5)), name
        rows = dp.predict(state, source(dp), several, **given)["found"]
        np.testing.assert_allclose(rows, wanted, rtol=1e-5, atol=1e-6, err_msg=name)
    together = {"loader": Loader(), "rows": DATA, "batch": SOURCES["a batch"][0](dp)}
    named = dp.evaluate(state, together)
    assert [each["rows"] for each in named.values()] == [ROWS] * 3


def test_sources_that_must_be_cut_or_are_cut_already() -> None:
    dp = parallel()
    state = dp.init(MODEL)
    for source in (grain_rows(), rx.ProcessLocal(DATA)):
        with pytest.raises(rx.errors.ConfigError, match="batch_size="):
            dp.evaluate(state, source)
    with pytest.raises(rx.errors.ConfigError, match="Feed"):
        dp.evaluate(state, dp.feed(DATA, BATCH), batch_size=8)
    with pytest.raises(rx.errors.DataError, match="str"):
        dp.evaluate(state, "rows.npz")


@places
def test_any_loss_is_evaluated(mode: str, devices: int, layout: str) -> None:
    traces = []

    def size(model: Any, batch: Any, key: Any) -> Any:
        traces.append(batch)
        return jnp.abs(batch["x"] @ model["w"]), {"y": rx.Weighted(batch["y"], batch["number"])}

    dp = parallel(mode, devices, layout)
    state = dp.init(MODEL)
    found = dp.evaluate(state, dp.feed(DATA, BATCH), loss=size)
    assert found["loss"] == pytest.approx(np.abs(DATA["x"] @ MODEL["w"]).mean(), rel=1e-5)
    wanted = np.average(DATA["y"], weights=DATA["number"])
    assert found["y"] == pytest.approx(wanted, rel=1e-5)
    assert found["rows"] == ROWS
    traced = len(traces)
    assert dp.evaluate(state, dp.feed(DATA, BATCH), loss=size) == found
    assert len(traces) == traced
    own = dp.evaluate(state, dp.feed(DATA, BATCH))
    assert own["loss"] == pytest.approx(float(jnp.mean(loss(MODEL, DATA, None))), rel=1e-5)


@dataclasses.dataclass
class Scaled:
    """A loss without a hash: its fields are arrays."""

    scale: jax.Array
    traces: int = 0

    def __call__(self, model: Any, batch: Any, key: Any) -> Any:
        self.traces += 1
        return self.scale * loss(model, batch, key)


def test_a_loss_without_a_hash_is_known_again() -> None:
    double, half = Scaled(jnp.full(1, 2.0)), Scaled(jnp.full(1, 0.5))
    dp = training.parallel(double, optax.sgd(0.1), mode="shard_map", devices=1)
    state, cut = dp.init(MODEL), {name: leaf[:8] for name, leaf in DATA.items()}
    found = [dp.evaluate(state, [cut], loss=each)["loss"] for each in (double, half)]
    assert found[0] == pytest.approx(4 * found[1])
    predicted = [dp.predict(state, [cut], each) for each in (double, half)]
    np.testing.assert_allclose(predicted[0], 4 * predicted[1], rtol=1e-6)
    traces = double.traces, half.traces
    assert [dp.evaluate(state, [cut], loss=each)["loss"] for each in (double, half)] == found
    dp.predict(state, [cut], half)
    assert (double.traces, half.traces) == traces
    assert float(dp.step(state, cut)[1]["loss"]) == pytest.approx(found[0])


@pytest.mark.parametrize(
    ("other", "mode", "error", "said"),
    [
        (lambda m, b, k: jnp.mean(b["y"]), "jit", rx.errors.LossError, "padding"),
        (lambda m, b, k: b["y"] - b["y"].mean(), "shard_map", rx.errors.LossError, "rows"),
        (lambda m, b, k: b["number"], "jit", rx.errors.LossError, "int32"),
        (drawn, "jit", TypeError, "NoneType"),
        (lambda m, b: b["y"], "jit", rx.errors.ConfigError, "loss"),
        ("loss", "jit", rx.errors.ConfigError, "loss"),
    ],
)
def test_another_loss_is_looked_at_as_the_first_is(
    other: Any, mode: str, error: type[Exception], said: str
) -> None:
    dp = parallel(mode, devices=8)
    state = dp.init(MODEL)
    dp.evaluate(state, dp.feed(DATA, BATCH))
    with pytest.raises(error, match=said) as caught:
        dp.evaluate(state, dp.feed(DATA, BATCH), loss=other)
    assert "\n" not in str(caught.value)
