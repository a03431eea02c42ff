"""How far apart clocks are."""

from typing import Any

import pytest

from replicax.core.job import Alone
from replicax.doctor.clocks import check_clocks, judge_clocks
from replicax.doctor.row import OK, SKIPPED, WARNING


def test_one_process_has_one_clock() -> None:
    (row,) = check_clocks(Alone())
    assert row.verdict == SKIPPED


def test_threads_share_a_clock(together: Any) -> None:
    for (row,) in together(3, check_clocks):
        assert row.verdict == OK
        assert row.figures["seconds_ahead_of_process_0"] == pytest.approx([0, 0, 0], abs=0.5)


def test_a_clock_that_is_off_is_named() -> None:
    rounds = [[(100.0 + n, 0.001), (100.1 + n, 0.004), (97.0 + n, 0.002)] for n in range(5)]
    (row,) = judge_clocks(rounds)
    assert row.verdict == WARNING
    assert "within 3.1 s of each other, ± 4.00 ms, process 2 farthest off" in row.found
    assert row.figures["seconds_ahead_of_process_0"] == pytest.approx([0, 0.1, -3.0])
    assert row.figures["within_seconds"] == pytest.approx([0, 0.004, 0.002])


def test_one_late_answer_is_no_clock_that_is_off() -> None:
    rounds = [[(100.0 + n, 0.001), (100.0 + n, 0.001)] for n in range(5)]
    rounds[2][1] = (107.0, 5.0)
    (row,) = judge_clocks(rounds)
    assert row.verdict == OK
    assert "within 0.00 ms of each other, ± 1.00 ms" in row.found


def test_a_slow_network_accuses_nobody() -> None:
    rounds = [[(100.0, 1.0), (101.5, 1.0)]] * 3
    (row,) = judge_clocks(rounds)
    assert row.verdict == OK
