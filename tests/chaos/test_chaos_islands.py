"""Disturbed runs of islands end as the undisturbed one."""

from collections.abc import Iterator

import pytest
from chaos.harness import Harness
from chaos.islands.harness import IslandsHarness
from chaos.results import IslandsOutcome
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
