"""A step that compiles once, and one that is given another program's batch."""

import jax
import pytest
from verify import zoo_recipes as zoo

import replicax as rx
from replicax.verify.facts import examine
from replicax.verify.program_cases import ProgramCases
from replicax.verify.subject import Subject


def test_a_batch_of_another_shape_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    dp = rx.DataParallel(zoo.good, zoo.Entry().optimizer(), mode="single")
    subject = Subject(dp, zoo.network(), zoo.data(), 1, 0)
    cases = ProgramCases(subject, examine(subject), lambda text: None)
    trial = cases.trial(subject.own)
    assert cases.recompilation(trial).verdict == "pass"
    fewer = jax.tree.map(lambda leaf: leaf[:-8], subject.padded)
    monkeypatch.setattr(subject, "padded", fewer)
    assert cases.recompilation(trial).verdict == "fail"
