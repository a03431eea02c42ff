"""The simulated step, against timelines drawn by hand."""

from dataclasses import dataclass

import pytest

from replicax.plan.forecast import StepTime, Transfer, step_time


@dataclass(frozen=True)
class Second:
    """A network on which a byte takes a second."""

    devices: int = 2

    def time(self, kind: str, size: float) -> float:
        return size


def step(compute: float, *transfers: tuple[float, float, float]) -> StepTime:
    moved = [Transfer("all-reduce", size, ready, needed) for size, ready, needed in transfers]
    return step_time(compute, moved, lambda _: Second())


def test_nothing_to_send() -> None:
    assert step(10) == StepTime(10, 10, 0, 0)
    assert step(0).efficiency == 1


@pytest.mark.parametrize(
    ("transfers", "expected"),
    [
        ([(3, 2, 5)], StepTime(10, 10, 3, 0)),
        ([(3, 2, 4)], StepTime(11, 10, 3, 1)),
        ([(3, 2, 2), (4, 6, 6)], StepTime(17, 10, 7, 7)),
        ([(3, 10, 10)], StepTime(13, 10, 3, 3)),
        ([(3, 9, 99)], StepTime(12, 10, 3, 2)),
        # In the order in which they are ready, whatever the order given.
        ([(5, 3, 10), (4, 2, 4)], StepTime(12, 10, 9, 2)),
        # The second starts when the first ends, at 7, and ends at 12.
        ([(5, 2, 10), (5, 3, 10)], StepTime(12, 10, 10, 2)),
        # It waits from 4 to 6; the second is ready at 2 + 5 = 7 and ends at 10, in time.
        ([(4, 2, 4), (3, 5, 8)], StepTime(12, 10, 7, 2)),
        # A short wait within a longer one costs nothing more.
        ([(4, 0, 1), (1, 0, 3)], StepTime(13, 10, 5, 3)),
    ],
)
def test_transfers_are_hidden_until_they_are_needed(
    transfers: list[tuple[float, float, float]], expected: StepTime
) -> None:
    assert step(10, *transfers) == expected
