"""Two runs, and two traces."""

from typing import Any

import pytest
from verify import zoo_recipes as zoo

import replicax as rx
from replicax.verify.facts import examine
from replicax.verify.program_cases import ProgramCases
from replicax.verify.step_checks import determinism
from replicax.verify.subject import Subject


@pytest.mark.parametrize(
    ("loss", "runs", "traces"),
    [
        (zoo.good, "pass", "pass"),
        (zoo.dropout, "pass", "pass"),
        (zoo.host_random, "fail", "pass"),
        (zoo.traced_random, "pass", "fail"),
    ],
)
def test_verdicts(loss: Any, runs: str, traces: str) -> None:
    dp = rx.DataParallel(loss, zoo.Entry().optimizer(), mode="single")
    subject = Subject(dp, zoo.network(), zoo.data(), 1, 0)
    cases = ProgramCases(subject, examine(subject), lambda text: None)
    trial = cases.trial(subject.own)
    found = determinism(trial, subject.full, trial.run([subject.full]))
    assert [found.verdict, cases.traces(trial).verdict] == [runs, traces]
    assert ("pure_callback" in found.cause) == (runs == "fail")
