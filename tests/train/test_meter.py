"""The meter: a record every so many steps, with each row, metric and wait in exactly one."""

import json
import math
from typing import Any

import jax.numpy as jnp
import pytest
from support.clock import Clock, clock_of

from replicax.core.step.base import StepFigure
from replicax.train.dispatched import Call, Finished, RunPosition
from replicax.train.files.records import Record
from replicax.train.guarded import NOT_FINITE, SPIKE
from replicax.train.run import step_records as module
from replicax.train.run.step_records import Meter, log_interval

clock = clock_of(module)


def done(
    step: int, loss: float, rows: int = 10, *, ready: int = 1, bad: str = "", **more: Any
) -> Finished:
    nothing, place = jnp.zeros(0), RunPosition(step, 0, step)
    results = {"loss": jnp.float32(loss), **more}
    results |= {NOT_FINITE: jnp.int32(bad == "not finite"), SPIKE: jnp.array(bad == "spike")}
    return Finished(Call(place, (rows,), nothing, nothing, results, is_one=True), 0, 1, ready)


def metered(meter: Meter, steps: range) -> list[Record]:
    return [record for step in steps for record in meter.finished(done(step, step))]


def saved(meter: Meter) -> dict[str, Any]:
    """Return the sums as a checkpoint holds them."""
    state: dict[str, Any] = json.loads(json.dumps(meter.save_state(), allow_nan=False))
    return state


def test_the_first_step_has_a_record_of_its_own_without_its_time() -> None:
    meter, loss = Meter(50), float(jnp.float32(0.1))
    for _ in range(2):
        (first,) = meter.finished(done(1, loss, 7))
        assert (first.kind, first.step, first.rows, first.seconds) == ("train", 1, 7, 0.0)
        assert first.metrics == {"loss": loss}
        assert first.input_wait_fraction is None
        metered(meter, range(2, 4))
        meter.rewind({}, resumed=False, compiled=False)  # back to the start


def test_a_run_of_known_length_has_enough_records_and_long_ones_no_more_than_before() -> None:
    found = {total: log_interval(total) for total in (1, 39, 40, 120, 999, 1000, 10**7, None)}
    assert list(found.values()) == [1, 1, 2, 5, 20, 50, 50, 50]


def test_a_figure_that_is_no_mean_has_its_last_value_or_none() -> None:
    def step(number: int, scale: float, norm: float) -> Finished:
        figures = StepFigure(jnp.float32(scale), latest=True), StepFigure(jnp.float32(norm))
        return done(number, number, scale=figures[0], norm=figures[1])

    meter = Meter(3)
    (first,) = meter.finished(step(1, 8.0, math.inf))  # skipped: it has no norm
    assert first.metrics == {"loss": 1.0, "scale": 8.0}
    meter.finished(step(2, 4.0, 3.0))
    again = Meter(3)
    again.rewind(saved(meter), resumed=True, compiled=False)
    for each in (meter, again):
        (record,) = each.finished(step(3, 2.0, math.inf))
        assert record.metrics == {"loss": 2.5, "scale": 2.0, "norm": 3.0}


def test_a_flush_records_the_last_step() -> None:
    meter = Meter(3)
    records = metered(meter, range(1, 9)) + meter.flush()
    assert [record.step for record in records] == [1, 3, 6, 8]
    # Records of the steps 1 | 2, 3 | 4, 5, 6 | 7, 8, whose losses are their numbers.
    assert [record.metrics["loss"] for record in records] == [1, 2.5, 5, 7.5]
    assert meter.flush() == []


def test_metrics_are_means_over_the_rows_since_the_last_record() -> None:
    meter = Meter(4)
    meter.finished(done(1, 9, accuracy=0.0))
    meter.finished(done(2, 5, 10, accuracy=0.5))
    meter.finished(done(3, 3, 30, accuracy=0.25))
    (record,) = meter.finished(done(4, 2, 60, accuracy=1.0))
    assert record.rows == 100
    # (10 x 5 + 30 x 3 + 60 x 2) / 100, and (10 x 0.5 + 30 x 0.25 + 60 x 1) / 100
    assert record.metrics == {"loss": 2.6, "accuracy": 0.725}


@pytest.mark.parametrize(("bad", "loss"), [("not finite", math.nan), ("spike", 1e6)])
def test_a_skipped_step_is_in_no_mean(bad: str, loss: float) -> None:
    meter = Meter(4)
    meter.finished(done(1, 9))
    meter.finished(done(2, 5, 10))
    meter.finished(done(3, loss, 40, bad=bad))
    (record,) = meter.finished(done(4, 2, 20))
    assert record.rows == 70
    assert record.metrics == {"loss": 3.0}  # (10 x 5 + 20 x 2) / 30
    *_, (record,) = [meter.finished(done(step, loss, bad=bad)) for step in range(5, 9)]
    assert record.rows == 40
    assert math.isnan(record.metrics["loss"])  # none is left


def test_a_metric_that_is_not_finite_is_left_out_alone() -> None:
    meter = Meter(3)
    meter.finished(done(1, 9, recall=0.5))
    meter.finished(done(2, 4, recall=math.nan))  # no row of that class, for example
    (record,) = meter.finished(done(3, 6, recall=0.25))
    assert record.metrics == {"loss": 5.0, "recall": 0.25}


def test_waiting_is_a_share_of_the_time_it_belongs_to(clock: Clock) -> None:
    meter = Meter(1)
    meter.add_wait(5.0)  # for the first batch: not in any rate
    metered(meter, range(1, 2))
    clock.now += 0.04
    meter.add_wait(0.02)
    (record,) = metered(meter, range(2, 3))
    assert record.seconds == pytest.approx(0.04)
    assert record.input_wait_fraction == pytest.approx(0.5)
    clock.now += 0.04
    (record,) = metered(meter, range(3, 4))
    assert record.input_wait_fraction == 0.0
    meter.add_wait(1000.0)
    clock.now += 0.04
    (record,) = metered(meter, range(4, 5))
    assert record.input_wait_fraction == 1.0


def test_steps_that_are_found_finished_together_share_the_time(clock: Clock) -> None:
    meter = Meter(2)
    meter.finished(done(1, 1, ready=3))
    clock.now += 8.0
    together = [
        meter.finished(done(step, 1, ready=ready))
        for step, ready in zip(range(2, 6), (4, 3, 2, 1), strict=True)
    ]
    assert [record.seconds for records in together for record in records] == [2.0, 4.0]
    clock.now += 1.0
    assert [record.seconds for record in meter.finished(done(6, 1))] == [3.0]


def test_steps_found_finished_after_an_evaluation_share_none_of_its_time(clock: Clock) -> None:
    meter = Meter(2)
    meter.finished(done(1, 1))
    clock.now += 100.0
    meter.leave_out(100.0)
    clock.now += 2.0
    (record,) = meter.finished(done(2, 1, ready=2))
    assert record.seconds == 1.0


def test_the_seconds_of_an_earlier_start_are_in_the_next_record(clock: Clock) -> None:
    meter = Meter(50)
    meter.rewind({"rows": 20, "seconds": 5.0}, resumed=True, compiled=False)
    clock.now += 100.0  # the step that compiles
    metered(meter, range(6, 7))
    (record,) = meter.flush()
    assert record.rows == 30
    assert record.seconds == 5.0
    assert record.metrics == {"loss": 6.0}  # a checkpoint without sums
    meter.rewind({"rows": 20, "seconds": 5.0}, resumed=True, compiled=False)
    metered(meter, range(5, 6))
    clock.now += 1.0
    metered(meter, range(6, 7))
    (record,) = meter.flush()
    assert record.rows == 40
    assert record.seconds == 6.0
