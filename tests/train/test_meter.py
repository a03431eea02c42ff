"""The meter: a record every so many steps, with each row, metric and wait in exactly one."""

import dataclasses
import json
import math
from typing import Any

import jax.numpy as jnp
import pytest
from support.clock import Clock, clock_of

from replicax.train import step_records as module
from replicax.train.dispatched import Dispatched, RunPosition
from replicax.train.records import Record
from replicax.train.step_records import Meter, log_interval

clock = clock_of(module)


def done(step: int, loss: float, rows: int = 10, *, bad: str = "", **more: float) -> Dispatched:
    nothing, place = jnp.zeros(0), RunPosition(step, 0, step)
    metrics = {name: jnp.float32(value) for name, value in {"loss": loss, **more}.items()}
    verdicts = jnp.array(bad == "not finite"), jnp.array(bad == "spike")
    return Dispatched(place, rows, nothing, nothing, metrics, *verdicts)


def metered(meter: Meter, steps: range) -> list[Record]:
    return [record for step in steps for record in meter.finished(done(step, step))]


def saved(meter: Meter) -> dict[str, Any]:
    """Return the sums as a checkpoint holds them."""
    state: dict[str, Any] = json.loads(json.dumps(meter.save_state(), allow_nan=False))
    return state


def test_the_first_step_has_a_record_of_its_own_without_its_time() -> None:
    (first,) = Meter(50).finished(done(1, 7))
    assert (first.kind, first.step, first.rows, first.seconds) == ("train", 1, 10, 0.0)
    assert first.metrics == {"loss": 7.0}
    assert first.input_wait_fraction is None


def test_records_come_every_log_every_steps() -> None:
    assert [record.step for record in metered(Meter(3), range(1, 12))] == [1, 3, 6, 9]


def test_a_run_of_known_length_has_enough_records_and_long_ones_no_more_than_before() -> None:
    found = {total: log_interval(total) for total in (1, 39, 40, 120, 999, 1000, 10**7, None)}
    assert list(found.values()) == [1, 1, 2, 5, 20, 50, 50, 50]


def test_a_figure_that_is_no_mean_has_its_last_value_or_none() -> None:
    def step(number: int, scale: float, norm: float) -> Dispatched:
        given = done(number, number, scale=scale, norm=norm)
        return dataclasses.replace(given, latest={"scale": True, "norm": False})

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


def test_a_mean_of_one_step_is_the_step_to_the_bit() -> None:
    value = float(jnp.float32(0.1))
    (first,) = Meter(1).finished(done(1, value, 7))
    assert first.metrics == {"loss": value}


@pytest.mark.parametrize(("bad", "loss"), [("not finite", math.nan), ("spike", 1e6)])
def test_a_skipped_step_is_in_no_mean(bad: str, loss: float) -> None:
    meter = Meter(4)
    meter.finished(done(1, 9))
    meter.finished(done(2, 5, 10))
    meter.finished(done(3, loss, 40, bad=bad))
    (record,) = meter.finished(done(4, 2, 20))
    assert record.rows == 70
    assert record.metrics == {"loss": 3.0}  # (10 x 5 + 20 x 2) / 30


def test_where_all_are_skipped_there_is_no_mean() -> None:
    meter = Meter(3)
    meter.finished(done(1, 9))
    meter.finished(done(2, math.nan, bad="not finite"))
    (record,) = meter.finished(done(3, math.nan, bad="not finite"))
    assert math.isnan(record.metrics["loss"])
    assert record.rows == 20


def test_a_metric_that_is_not_finite_is_left_out_alone() -> None:
    meter = Meter(3)
    meter.finished(done(1, 9, recall=0.5))
    meter.finished(done(2, 4, recall=math.nan))  # no row of that class, for example
    (record,) = meter.finished(done(3, 6, recall=0.25))
    assert record.metrics == {"loss": 5.0, "recall": 0.25}


def test_a_last_step_on_the_beat_is_recorded_once() -> None:
    meter = Meter(3)
    records = metered(meter, range(1, 7)) + meter.flush()
    assert [record.step for record in records] == [1, 3, 6]


@pytest.mark.parametrize("log_every", [1, 2, 7, 100])
def test_every_row_is_in_one_record(log_every: int) -> None:
    meter = Meter(log_every)
    records = metered(meter, range(1, 12)) + meter.flush()
    records += metered(meter, range(12, 23)) + meter.flush()
    assert sum(record.rows for record in records) == 220
    steps = [record.step for record in records]
    assert steps == sorted(set(steps))
    assert steps[-1] == 22


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


def test_waiting_is_never_more_than_all_the_time() -> None:
    meter = Meter(1)
    metered(meter, range(1, 2))
    meter.add_wait(1000.0)
    (record,) = metered(meter, range(2, 3))
    assert record.input_wait_fraction == 1.0


def test_steps_that_are_found_finished_together_share_the_time(clock: Clock) -> None:
    meter = Meter(2)
    meter.finished(done(1, 1), 3)
    clock.now += 8.0
    together = [
        meter.finished(done(step, 1), ready) for step, ready in ((2, 4), (3, 3), (4, 2), (5, 1))
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
    (record,) = meter.finished(done(2, 1), 2)
    assert record.seconds == 1.0


def test_an_evaluation_is_left_out_of_the_rate(clock: Clock) -> None:
    meter = Meter(100)
    metered(meter, range(1, 2))
    clock.now += 100.0
    meter.leave_out(100.0)
    clock.now += 0.5
    metered(meter, range(2, 3))
    (record,) = meter.flush()
    assert record.seconds == 0.5


@pytest.mark.parametrize("step", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("new_start", [False, True])
def test_steps_repeated_after_a_rewind_are_recorded_once(step: int, new_start: bool) -> None:
    meter = Meter(3)
    records = metered(meter, range(1, step + 1))
    state = saved(meter)
    metered(meter, range(step + 1, step + 3))  # done for nothing
    if new_start:
        meter = Meter(3)
    meter.rewind(state, resumed=True, compiled=not new_start)
    records += metered(meter, range(step + 1, 11)) + meter.flush()
    assert [record.step for record in records] == [1, 3, 6, 9, 10]
    assert [record.rows for record in records] == [10, 20, 30, 30, 10]
    assert [record.metrics["loss"] for record in records] == [1, 2.5, 5, 8, 10]


def test_a_mean_is_the_same_to_the_bit_however_often_it_is_saved() -> None:
    once, often = Meter(20), Meter(20)
    for step in range(1, 20):
        for meter in (once, often):
            meter.finished(done(step, 0.1 * step, 3 + step, accuracy=1 / step))
        often.rewind(saved(often), resumed=True, compiled=True)
    (wanted,), (found,) = (meter.finished(done(20, 0.3)) for meter in (once, often))
    assert found.metrics == wanted.metrics
    assert found.rows == wanted.rows


@pytest.mark.parametrize("state", [{}, {"rows": 20, "seconds": 5.0}])
def test_a_checkpoint_without_sums_is_resumed(state: dict[str, float]) -> None:
    meter = Meter(50)
    meter.rewind(state, resumed=True, compiled=False)
    metered(meter, range(6, 9))
    (record,) = meter.flush()
    assert record.metrics == {"loss": 7.0}  # of steps 6, 7, 8
    assert record.rows == 30 + state.get("rows", 0)


def test_the_seconds_of_an_earlier_start_are_in_the_next_record(clock: Clock) -> None:
    meter = Meter(50)
    meter.rewind({"rows": 20, "seconds": 5.0}, resumed=True, compiled=False)
    clock.now += 100.0  # the step that compiles
    metered(meter, range(6, 7))
    (record,) = meter.flush()
    assert record.rows == 30
    assert record.seconds == 5.0
    meter.rewind({"rows": 20, "seconds": 5.0}, resumed=True, compiled=False)
    metered(meter, range(5, 6))
    clock.now += 1.0
    metered(meter, range(6, 7))
    (record,) = meter.flush()
    assert record.rows == 40
    assert record.seconds == 6.0


def test_a_rewind_to_the_start_is_a_start() -> None:
    meter = Meter(50)
    metered(meter, range(1, 4))
    meter.rewind({}, resumed=False, compiled=False)
    (first,) = meter.finished(done(1, 7))
    assert (first.step, first.rows, first.seconds) == (1, 10, 0.0)
