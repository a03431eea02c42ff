"""Disturbed runs of islands end as the undisturbed one."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from chaos.harness import Harness
from chaos.islands.harness import IslandsHarness
from chaos.islands.rounds import ROUND_FAULTS
from chaos.results import IslandsOutcome, add_to_file, table
from support import programs
from support.tiers import EXHAUSTIVE


@pytest.fixture(scope="module")
def harness() -> Iterator[Harness]:
    with IslandsHarness(programs=programs.FOLDER) as opened:
        yield opened


def check(outcomes: list[IslandsOutcome], kinds: list[str]) -> None:
    wrong = [outcome.line() for outcome in outcomes if outcome.wrong]
    assert not wrong, "\n".join(wrong)
    assert sorted(outcome.fault for outcome in outcomes if not outcome.missed) == sorted(kinds)
    assert all(outcome.equal for outcome in outcomes)


def test_nobody_can_tell_that_an_island_died_joined_or_froze(harness: Harness) -> None:
    kinds = ["kill", "kill-joining", "freeze"]
    check(harness.run(kinds, 3, seed=0, jobs=3), kinds)


@EXHAUSTIVE
def test_nobody_can_tell_what_happened_to_the_islands(harness: Harness) -> None:
    kinds = ["kill-others", "kill-saving", "kill-sending", "fresh-left", "halves", "corrupt"]
    kinds += ["strangers", "launch", "several"]
    check(harness.run(kinds, len(kinds), seed=0, jobs=2), kinds)


@pytest.fixture(scope="module")
def rounds() -> Iterator[Harness]:
    with IslandsHarness(programs=programs.FOLDER, rounds=True) as opened:
        yield opened


def test_a_lost_island_costs_its_round(rounds: Harness) -> None:
    check(rounds.run(["kill-round"], 1, seed=0), ["kill-round"])


@EXHAUSTIVE
def test_islands_with_rounds_end_alike_whatever_happened(rounds: Harness) -> None:
    kinds = ["kill", "kill-all", "kill-joining", "kill-saving", "term", "freeze", "resize"]
    kinds += ["term-all", "slow", "kill-many", "halves", "launch"]
    check(rounds.run(kinds, len(kinds), seed=0, jobs=2), kinds)


def outcome(**differs: object) -> IslandsOutcome:
    usual = {"fault": "kill-unproven", "seed": 1, "islands": 3, "how": "kill 0", "missed": False}
    usual |= {
        "equal": True,
        "hung": False,
        "starts": 4,
        "left": 1,
        "seconds": 3.0,
        "cpu_seconds": 4.0,
    }
    usual |= {"usual_step_seconds": 0.02, "recovery_seconds": [0.5, 12.25], "join_seconds": [0.1]}
    return IslandsOutcome(**{**usual, "wrong": [], **differs})  # type: ignore[arg-type]


def test_the_table_fits_a_terminal() -> None:
    lines = list(table([outcome()] * 9_999))
    assert all(len(line) <= 80 for line in lines)
    cells = ["kill-unproven", "9999", "0", "0", "9999", "6375", "12250", "12250", "100"]
    assert lines[1].split() == cells


def test_a_file_of_results_adds_up(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    for each in (
        outcome(),
        outcome(wrong=["step is 3"], equal=False, recovery_seconds=[1.0]),
        outcome(fault="kill", missed=True),
    ):
        add_to_file(path, each, {"cores": 2})
    told = json.loads(path.read_text())
    counted = {"runs": 2, "failures": 1, "hangs": 0, "unequal": 1, "restarts": 3, "left": 3}
    assert told["all"] == counted
    assert told["faults"]["kill-unproven"]["recovery_ms"] == {
        "median": 1000,
        "p95": 12250,
        "max": 12250,
    }
    assert told["faults"]["kill"]["missed"] == 1


def test_every_fault_is_told() -> None:
    assert all(fault.what and len(name) <= 14 for name, fault in ROUND_FAULTS.items())
