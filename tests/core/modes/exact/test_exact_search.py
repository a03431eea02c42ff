"""Eight draws of the search for other bits in mode `exact`.

`benchmarks/exact_search.py` runs a thousand.
"""

import hypothesis
import pytest
from exact_bits import compared, kind
from exact_draws import Draw, draws
from support.tiers import EXHAUSTIVE

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:optax")  # by one another


@pytest.mark.promise("exact.every-optimizer")
@EXHAUSTIVE
@hypothesis.settings(
    max_examples=4,
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=list(hypothesis.HealthCheck),
    phases=[hypothesis.Phase.generate],  # a draw is seconds, and shrinking takes hundreds
)
@hypothesis.given(draws())
def test_drawn_cases_have_the_same_bits_on_any_devices(draw: Draw) -> None:
    hypothesis.event(kind(compared(draw)) or "trains")
