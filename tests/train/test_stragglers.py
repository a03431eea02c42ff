"""The process that the others wait for is named, once, by the times in the votes."""

from typing import Any

import jax.numpy as jnp
import optax
import pytest
from support.clock import Clock, clock_of
from support.figures import assert_mentions

import replicax as rx
from replicax.core.ground.in_flight import InFlight
from replicax.train.run import stragglers
from replicax.train.run.stragglers import StepTimes

clock = clock_of(stragglers)


class Run:
    """Process 0 of three, in a run whose votes come every 20 steps."""

    def __init__(self, clock: Clock) -> None:
        self.clock, self.in_flight, self.said = clock, InFlight(), list[str]()
        self.times = StepTimes(self.in_flight, self.said.append)

    def vote(self, own: list[float], waited: list[float], *, step: float = 0.1) -> None:
        """Do 20 steps, of which each process takes so long itself, or waits for its devices."""
        for _ in range(20):
            self.times.dispatched(1, step - own[0] - waited[0])
            self.in_flight.waited_seconds += waited[0]
            self.clock.now += step
        mine = self.times.mine()
        assert mine is not None
        assert mine["own"] == pytest.approx(20 * own[0])
        others: list[Any] = [
            {
                **mine,
                "host": f"host{number}",
                "own": 20 * own[number],
                "waited": 20 * waited[number],
            }
            for number in (1, 2)
        ]
        self.times.heard([mine, *others])
        self.times.vote_ended()


def test_it_is_named_once_after_ten_seconds(clock: Clock) -> None:
    run = Run(clock)
    for vote in range(20):
        run.vote([0.01, 0.01, 0.03], [0.08, 0.08, 0.0])
        assert len(run.said) == (vote >= 4)
    assert_mentions(run.said[0], "process 2", "host2", "30.0 ms", "10.0 ms", "100.0 ms")
    for _ in range(10):
        run.vote([0.01, 0.05, 0.03], [0.08, 0.0, 0.0])
    assert_mentions(run.said[1], "process 1", "50.0 ms")


@pytest.mark.parametrize(
    ("own", "waited", "step"),
    [
        ([0.01, 0.01, 0.014], [0.08, 0.08, 0.0], 0.1),  # 4% of a step
        ([0.01, 0.01, 0.03], [0.08, 0.08, 0.05], 0.1),  # beside its devices, which take longer
        ([0.0001, 0.0001, 0.0009], [0.0, 0.0, 0.0], 0.001),  # less than a millisecond
    ],
)
def test_nobody_is_who_is_not_waited_for(
    clock: Clock, own: list[float], waited: list[float], step: float
) -> None:
    run = Run(clock)
    for _ in range(int(25 / (20 * step))):
        run.vote(own, waited, step=step)
    assert run.said == []


def test_what_is_no_step_is_left_out(clock: Clock) -> None:
    times = Run(clock).times
    assert times.mine() is None
    times.dispatched(1, 0.0)
    assert times.mine() is not None
    times.interrupted()
    assert times.mine() is None
    times.heard([None, None])
    times.vote_ended()
    times.dispatched(1, 0.0)
    assert times.mine() is not None


def test_the_first_step_of_a_run_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that compiles for longer is not slow."""
    left_out = list[StepTimes]()
    monkeypatch.setattr(StepTimes, "interrupted", lambda times: left_out.append(times))
    dp = rx.DataParallel(lambda w, batch, key: (batch["x"] - w) ** 2, optax.sgd(0.1))
    rows = {"x": jnp.arange(16.0)}
    rx.fit(dp, dp.init(jnp.zeros(())), rows, batch_size=8, steps=4, progress=False)
    assert len(left_out) == 1
