"""Which islands begin."""

import pytest

from replicax.islands.founding import FOUND_SECONDS, founders
from replicax.islands.messages import Ready


@pytest.mark.parametrize(
    ("there", "waited", "is_over", "begins"),
    [
        (3, 0.0, False, True),
        (2, FOUND_SECONDS - 1, False, False),
        (2, FOUND_SECONDS + 1, False, True),
        (1, FOUND_SECONDS + 1, False, False),
        (1, FOUND_SECONDS + 1, True, True),
        (1, FOUND_SECONDS - 1, True, False),  # all may have been started again
    ],
)
def test_enough_of_three_islands_begin(
    there: int, waited: float, is_over: bool, begins: bool
) -> None:
    starts = [(index, f"start {index}") for index in range(there)]
    asks = {index: (start, Ready("{}", list(range(there)))) for index, start in starts[1:]}
    found = founders(starts[0], 3, asks, asks, waited, lambda: is_over)
    assert sorted(found) == (starts if begins else [])
