"""Parameters that do not learn, and why."""

from typing import Any

import pytest
from verify import zoo_recipes as zoo

import replicax as rx
from replicax.verify.facts import examine
from replicax.verify.program_cases import ProgramCases
from replicax.verify.subject import Subject


def checks(entry: zoo.Entry) -> dict[str, Any]:
    dp = rx.DataParallel(entry.loss, entry.optimizer(), mode="single")
    subject = Subject(dp, entry.model(), zoo.data(), 1, 0)
    cases = ProgramCases(subject, examine(subject), lambda text: None)
    return {check.case: check for check in cases.parameters()}


@pytest.mark.parametrize(
    ("name", "gradient", "update"),
    [
        ("plain", "pass", "pass"),
        ("gate of 0", "pass", "pass"),
        ("frozen by stop_gradient", "note", "pass"),
        ("frozen by optax", "pass", "note"),
    ],
)
def test_correct(name: str, gradient: str, update: str) -> None:
    found = checks(zoo.CORRECT[name])
    assert (found["gradient"].verdict, found["update"].verdict) == (gradient, update)


def test_dead() -> None:
    found = checks(zoo.BROKEN["dead parameter"])["gradient"]
    assert found.verdict == "fail"
    assert found.figures["dead"] == ["['unused']"]
