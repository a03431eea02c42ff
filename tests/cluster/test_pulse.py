"""The position of a process, by a fake clock."""

import re
import threading

import pytest

from replicax.cluster import pulse as pulse_module
from replicax.cluster.patience import Patience
from replicax.cluster.pulse import Pulse, Standing
from replicax.core.ground import in_flight
from replicax.core.ground.in_flight import InFlight

PATIENCE = Patience(stall_multiple=10.0, stall_seconds=60.0, start_seconds=1800.0)


class Clock:
    def __init__(self) -> None:
        self.now = 500.0

    def monotonic(self) -> float:
        return self.now


class Result:
    """An array that the devices compute."""

    def __init__(self, done: bool = False, deleted: bool = False) -> None:
        self.done, self.deleted = done, deleted

    def is_ready(self) -> bool:
        if self.deleted:
            raise RuntimeError("Array has been deleted")
        return self.done

    def block_until_ready(self) -> None:
        assert self.done


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(pulse_module, "time", clock)
    return clock


@pytest.fixture
def pulse(clock: Clock) -> Pulse:
    return Pulse(InFlight())


def begin(pulse: Pulse, result: Result) -> None:
    """Dispatch a step to the devices."""
    pulse.move()
    pulse.in_flight.add(result)


def step(pulse: Pulse, clock: Clock, seconds: float) -> None:
    """Take one step of `seconds`, and a beat."""
    clock.now += seconds
    begin(pulse, Result(done=True))
    pulse.stand(PATIENCE)


def test_before_the_first_step(pulse: Pulse, clock: Clock) -> None:
    clock.now += 100.0
    assert pulse.stand(PATIENCE) == Standing(0, 0, "starting", 100.0, 1800.0)


def test_begun_and_finished(pulse: Pulse, clock: Clock) -> None:
    results = [Result() for _ in range(4)]
    for result in results:
        begin(pulse, result)
    results[0].done = True
    results[1].deleted = True
    results[3].done = True  # the devices work in order: it can only be a guess
    stand = pulse.stand(PATIENCE)
    assert (stand.begun, stand.finished) == (4, 2)
    pulse.in_flight.enter()
    assert pulse.stand(PATIENCE).begun == 5
    assert re.fullmatch(r"has begun 4 steps and .* 2, stepping for 0\.0 s", str(stand))


def test_the_usual_time_is_the_median(pulse: Pulse, clock: Clock) -> None:
    step(pulse, clock, 0.0)
    assert pulse.stand(PATIENCE).allowed_seconds == 1800.0  # one step gives no duration
    for seconds in (8.0, 8.0, 900.0, 8.0):
        step(pulse, clock, seconds)
    clock.now += 79.0
    assert pulse.stand(PATIENCE) == Standing(5, 5, "stepping", 79.0, 80.0)


def test_a_loop_that_is_stuck_after_its_first_beat(pulse: Pulse, clock: Clock) -> None:
    for _ in range(18):
        clock.now += 0.01
        begin(pulse, Result(done=True))
    pulse.stand(PATIENCE)
    clock.now += 61.0
    stand = pulse.stand(PATIENCE)
    assert (stand.seconds, stand.allowed_seconds) == (61.0, 60.0)


def test_a_loop_that_runs_ahead_of_its_devices(
    pulse: Pulse, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """50 steps of 20 seconds are dispatched at once: nobody is stuck."""
    monkeypatch.setattr(in_flight, "STEPS_IN_FLIGHT", 50)
    results = [Result() for _ in range(50)]
    for result in results:
        clock.now += 0.001
        begin(pulse, result)
    for number, result in enumerate(results):
        clock.now += 20.0
        stand = pulse.stand(PATIENCE)
        assert stand.seconds < 20.1
        assert stand.seconds < stand.allowed_seconds
        result.done = True
        assert pulse.stand(PATIENCE).finished == number + 1
    assert pulse.stand(PATIENCE).allowed_seconds == pytest.approx(200.0)
    clock.now += 201.0
    assert pulse.stand(PATIENCE).seconds == 201.0


def test_resting_and_moving(pulse: Pulse, clock: Clock) -> None:
    step(pulse, clock, 1.0)
    pulse.rest()
    clock.now += 500.0
    assert pulse.stand(PATIENCE).doing == "idle"
    pulse.move()
    clock.now += 0.5
    stand = pulse.stand(PATIENCE)
    assert (stand.doing, stand.seconds) == ("stepping", 0.5)


def test_standing_still_as_a_whole_is_forgiven(pulse: Pulse, clock: Clock) -> None:
    step(pulse, clock, 1.0)
    clock.now += 105.0
    pulse.forgive(100.0)
    assert pulse.stand(PATIENCE).seconds == 5.0
    pulse.forgive(100.0)  # it has moved meanwhile: never into the future
    assert pulse.stand(PATIENCE).seconds == 0.0


@pytest.mark.parametrize(
    ("file", "doing"),
    [("/x/jax/_src/compiler.py", "compiling"), ("/x/jax/_src/callback.py", "in a callback")],
)
def test_the_stacks_tell_more(pulse: Pulse, clock: Clock, file: str, doing: str) -> None:
    inside, leaving = threading.Event(), threading.Event()
    names: dict[str, object] = {"inside": inside, "leaving": leaving}
    exec(compile("def wait():\n    inside.set()\n    leaving.wait(5)", file, "exec"), names)
    thread = threading.Thread(target=names["wait"])  # type: ignore[arg-type]
    step(pulse, clock, 1.0)
    step(pulse, clock, 1.0)
    thread.start()
    inside.wait(5)
    clock.now += 0.9
    assert pulse.stand(PATIENCE).doing == "stepping"  # not worth a look
    clock.now += 0.2
    stand = pulse.stand(PATIENCE)
    leaving.set()
    thread.join()
    assert stand.doing == doing
    assert stand.allowed_seconds == (1800.0 if doing == "compiling" else 60.0)
