"""How long an island waits for others that make no progress."""

import time
from types import SimpleNamespace

import pytest

from replicax.cluster.watchdog import Timeouts
from replicax.islands import pace
from replicax.islands.pace import Pace


class Clock:
    """The clock of a pace, which a test sets."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(pace, "time", SimpleNamespace(monotonic=clock.monotonic, time=time.time))
    return clock


def pace_of(*exchanges: float) -> Pace:
    found = Pace(Timeouts(stall_multiple=10.0, stall_seconds=60.0, start_seconds=1800.0))
    for seconds in exchanges:
        found.exchanged(seconds, changed=False)
    return found


def test_there_is_a_usual_time_after_two_exchanges(clock: Clock) -> None:
    assert pace_of(9.0).allowed(slow=False) == 1800.0
    assert pace_of(7.0, 9.0).allowed(slow=False) == 80.0
    assert pace_of(7.0, 9.0).allowed(slow=True) == 1800.0
    assert pace_of(1.0, 1.0).allowed(slow=False) == 60.0
    assert pace_of(*[100.0] * 30, *[7.0] * 12).allowed(slow=False) == 70.0


def test_a_long_step_between_short_exchanges_is_usual(clock: Clock) -> None:
    """So an island that is twice as slow is waited for at the end of a round."""
    own = pace_of(0.1, 0.1, 0.1)
    for seconds in (20.0, 0.0, 12.0):
        clock.now += seconds
        own.move()
    assert own.allowed(slow=False) == 200.0
    for _ in range(20):
        own.move()
    assert own.allowed(slow=False) == 60.0


def test_rest_is_no_step(clock: Clock) -> None:
    own = pace_of(0.1, 0.1)
    own.move()
    own.rest()
    clock.now += 1000.0
    own.move()
    assert own.allowed(slow=False) == 60.0


def test_an_exchange_in_which_the_group_changed_is_a_delay() -> None:
    own = pace_of(1.0, 3.0, 2.0)
    own.exchanged(9.5, changed=True)
    own.exchanged(1.0, changed=True)
    assert own.delayed_seconds == 7.5
    assert own.allowed(slow=False) == 60.0
