"""The tracker of dispatched steps, with fake results."""

import threading

import jax
import jax.numpy as jnp
import pytest

from replicax.core.ground.in_flight import STEPS_IN_FLIGHT, InFlight


class Result:
    """A fake array on devices: done when waited for, or before."""

    def __init__(self, error: Exception | None = None) -> None:
        self.done, self.waited, self.error = False, 0, error

    def is_ready(self) -> bool:
        return self.done

    def block_until_ready(self) -> None:
        self.waited += 1
        self.done = True
        if self.error is not None:
            raise self.error


def added(steps: InFlight, count: int) -> list[Result]:
    """The results of `count` steps, each with its number as a note."""
    results = [Result() for _ in range(count)]
    for result in results:
        steps.add(result)
        steps.note(steps.begun)
    return results


def test_what_a_step_raises_is_raised_although_it_was_counted() -> None:
    steps = InFlight()
    reason = "connection reset by peer"
    broken = Result(RuntimeError(reason))
    steps.add(broken)
    broken.done = True
    assert steps.finished == 1
    with pytest.raises(RuntimeError, match=reason):
        added(steps, STEPS_IN_FLIGHT)


def test_notes_come_in_order_once_their_steps_have_finished() -> None:
    steps = InFlight()
    added(steps, STEPS_IN_FLIGHT)
    assert list(steps.notes()) == []
    added(steps, 3)
    assert list(steps.notes()) == [1, 2, 3]
    assert steps.remaining == [4, 5, 6, 7]
    assert list(steps.notes(1)) == [4, 5, 6]
    assert list(steps.notes(0)) == [7]
    assert list(steps.notes(0)) == []


def test_notes_can_be_dropped() -> None:
    steps = InFlight()
    added(steps, 2 * STEPS_IN_FLIGHT)
    steps.forget()
    assert steps.remaining == []
    added(steps, 1)
    assert list(steps.notes(0)) == [2 * STEPS_IN_FLIGHT + 1]


def test_another_thread_may_look_at_any_time() -> None:
    steps, over = InFlight(), threading.Event()
    seen: list[tuple[int, int]] = []

    def look() -> None:
        while not over.is_set():
            seen.append((steps.finished, steps.begun))

    thread = threading.Thread(target=look)
    thread.start()
    added(steps, 20_000)
    over.set()
    thread.join()
    assert all(finished <= begun for finished, begun in seen)
    assert [pair[0] for pair in seen] == sorted(pair[0] for pair in seen)


def test_steps_that_finished_after_those_of_a_note_are_counted() -> None:
    steps, done = InFlight(), jax.block_until_ready(jnp.zeros(()))
    for number in range(3):
        steps.add(done, 2)
        steps.note(number)
    assert [(note, steps.finished_since) for note in steps.notes(1)] == [(0, 4), (1, 2)]
