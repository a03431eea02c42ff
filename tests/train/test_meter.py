"""The meter: records every so many steps, each row and each wait in exactly one of them."""

import jax.numpy as jnp
import pytest
from support.clock import Clock

from replicax.train import meter as module
from replicax.train.dispatched import Dispatched, Place
from replicax.train.meter import Meter
from replicax.train.records import Record


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


def done(step: int, loss: float, rows: int = 10) -> Dispatched:
    nothing = jnp.zeros(0)
    metrics = {"loss": jnp.float32(loss)}
    return Dispatched(Place(step, 0, step), rows, nothing, nothing, metrics, nothing, None)


def metered(meter: Meter, steps: range) -> list[Record]:
    return [record for step in steps for record in meter.finished(done(step, step))]


def test_the_first_step_has_a_record_of_its_own_without_its_time() -> None:
    (first,) = Meter(50).finished(done(1, 7))
    assert (first.kind, first.step, first.rows, first.seconds) == ("train", 1, 10, 0.0)
    assert first.metrics == {"loss": 7.0}
    assert first.input_wait_fraction is None


def test_records_come_every_log_every_steps() -> None:
    assert [record.step for record in metered(Meter(3), range(1, 12))] == [1, 3, 6, 9]


def test_a_flush_records_the_last_step() -> None:
    meter = Meter(3)
    records = metered(meter, range(1, 9)) + meter.flush()
    assert [record.step for record in records] == [1, 3, 6, 8]
    assert [record.metrics["loss"] for record in records] == [1, 3, 6, 8]
    assert meter.flush() == []


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
def test_what_is_done_again_after_a_rewind_is_recorded_once(step: int, new_start: bool) -> None:
    meter = Meter(3)
    records = metered(meter, range(1, step + 1))
    rows, seconds = meter.unrecorded
    metered(meter, range(step + 1, step + 3))  # done for nothing
    if new_start:
        meter = Meter(3)
    meter.rewind(rows, seconds, resumed=True, compiled=not new_start)
    records += metered(meter, range(step + 1, 11)) + meter.flush()
    assert [record.step for record in records] == [1, 3, 6, 9, 10]
    assert [record.rows for record in records] == [10, 20, 30, 30, 10]


def test_the_seconds_of_an_earlier_start_are_in_the_next_record(clock: Clock) -> None:
    meter = Meter(50)
    meter.rewind(20, 5.0, resumed=True, compiled=False)
    clock.now += 100.0  # the step that compiles
    metered(meter, range(6, 7))
    (record,) = meter.flush()
    assert record.rows == 30
    assert record.seconds == 5.0
    meter.rewind(20, 5.0, resumed=True, compiled=False)
    metered(meter, range(5, 6))
    clock.now += 1.0
    metered(meter, range(6, 7))
    (record,) = meter.flush()
    assert record.rows == 40
    assert record.seconds == 6.0


def test_a_rewind_to_the_start_is_a_start() -> None:
    meter = Meter(50)
    metered(meter, range(1, 4))
    meter.rewind(0, 0.0, resumed=False, compiled=False)
    (first,) = meter.finished(done(1, 7))
    assert (first.step, first.rows, first.seconds) == (1, 10, 0.0)
