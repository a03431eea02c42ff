"""Timeouts between processes, and the variables that set them."""

import pytest

from replicax.cluster.patience import Patience, find_patience
from replicax.errors import ConfigError


def test_the_usual_step_times_a_multiple_but_never_too_short() -> None:
    patience = Patience(stall_multiple=10.0, stall_seconds=60.0, start_seconds=1800.0)
    assert patience.allowed(0.1) == 60.0
    assert patience.allowed(30.0) == 300.0
    assert patience.allowed(None) == 1800.0


def test_signs_of_life_come_several_times_before_silence() -> None:
    assert Patience().beat_seconds == 1.0
    assert Patience(silent_seconds=2.0).beat_seconds == 0.25


def test_from_the_environment() -> None:
    found = find_patience(
        {
            "REPLICAX_STALL_SECONDS": "2",
            "REPLICAX_STALL_MULTIPLE": "3.5",
            "REPLICAX_START_SECONDS": "40",
            "REPLICAX_SILENT_SECONDS": "5e0",
        }
    )
    assert found == Patience(3.5, 2.0, 40.0, 5.0)
    assert find_patience({}) == Patience()


@pytest.mark.parametrize("value", ["", "0", "-1", "soon", "nan"])
def test_a_limit_that_is_none(value: str) -> None:
    with pytest.raises(ConfigError, match=rf"REPLICAX_STALL_SECONDS={value}; .*above 0"):
        find_patience({"REPLICAX_STALL_SECONDS": value})
