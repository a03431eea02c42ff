"""Records have metrics that are no means: of all rows since the last record."""

import json
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.counted_metrics import F1, MODEL, by_the_book, loss, rows
from support.tiers import EXHAUSTIVE

import replicax as rx
from replicax.core.data.merged import Merged, apart
from replicax.core.models.metric_objects import as_metric
from replicax.train.dispatched import Call, Finished, RunPosition
from replicax.train.guarded import NOT_FINITE
from replicax.train.run.step_records import Meter


def part(metric: Any) -> Merged:
    known = as_metric(metric)
    assert known is not None
    return apart("m", *known, jnp.ones(4))


def done(step: int, metric: Any, *, skipped: bool = False) -> Finished:
    nothing, place = jnp.zeros(0), RunPosition(step, 0, step)
    results = {"loss": jnp.float32(step), "m": part(metric), NOT_FINITE: jnp.int32(skipped)}
    return Finished(Call(place, (4,), nothing, nothing, results, is_one=True), 0, 1, 1)


def f1(right: float, wrong: float) -> F1:
    return F1(jnp.float32(right), jnp.float32(wrong))


def test_a_record_has_the_metric_of_its_rows() -> None:
    meter = Meter(4)
    (first,) = meter.finished(done(1, f1(1, 0)))
    assert first.metrics == {"loss": 1.0, "m": 1.0}
    meter.finished(done(2, f1(1, 2)))
    meter.finished(done(3, f1(100, 1), skipped=True))
    again = Meter(4)
    again.rewind(json.loads(json.dumps(meter.save_state())), resumed=True, compiled=True)
    for each in (meter, again):
        (record,) = each.finished(done(4, f1(3, 4)))
        assert record.metrics["m"] == 8 / 14
    assert meter.save_state().keys() == {"rows", "seconds", "sums"}
    again.finished(done(5, f1(5, 0)))
    (record,) = again.flush()
    assert record.metrics["m"] == 1.0


def test_one_that_grows_is_that_of_the_last_step() -> None:
    meter = Meter(3)
    for step in (1, 2):
        meter.finished(done(step, rx.HostMetric(np.max, jnp.arange(4.0) + step)))
    assert "merged" not in meter.save_state()
    (record,) = meter.finished(done(3, rx.HostMetric(np.max, jnp.arange(4.0))))
    assert record.metrics == {"loss": 2.5, "m": 3.0}


def test_records_have_numbers() -> None:
    with pytest.raises(rx.errors.LossError, match=r"'m'.*\[4\]"):
        Meter(1).finished(done(1, rx.HostMetric(lambda rows: rows, jnp.arange(4.0))))


@EXHAUSTIVE
@pytest.mark.parametrize("together", [1, 4])
def test_a_run_has_them(together: int) -> None:
    dp = rx.DataParallel(loss, optax.sgd(0.0), mode="shard_map")
    settings = {"batch_size": 32, "log_every": 6, "eval_source": rows(), "progress": False}
    fit = rx.fit(dp, dp.init(MODEL), rows(), steps=12, steps_per_call=together, **settings)
    last = {record.kind: record.metrics for record in fit.records}
    for name, value in by_the_book().items():
        assert last["eval"][name] == pytest.approx(value, rel=2e-6)
        if name != "auc":
            assert last["train"][name] == pytest.approx(value, rel=2e-6)
    early = rx.hooks.EarlyStopping("f1", patience=1)
    stopped = rx.fit(dp, dp.init(MODEL), rows(), epochs=5, hooks=[early], **settings)
    assert stopped.steps < 15
