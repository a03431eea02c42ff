"""Classic mistakes in hand-written steps are found and named; correct steps pass."""

import pytest
from support.tiers import only
from verify.zoo_broken_steps import BROKEN
from verify.zoo_correct_steps import CORRECT

from replicax.verify.step import verify_step
from replicax.verify.verification import Verification


def verified(name: str) -> Verification:
    entry = (BROKEN | CORRECT)[name]
    return verify_step(entry.step(), entry.reference, entry.state(), entry.batch(), **entry.options)


USUAL = (
    "batch_replicated",
    "one_replica_strays",
    "jit_in_each_call",
    "key_of_the_clock",
    "counted_inside",
    "reads_what_it_donated",
)
"""One mistake for each subject; `lint.test_rules` has more of parity."""


@pytest.mark.promise("verify.mistakes-are-named")
@pytest.mark.parametrize("name", only(USUAL, BROKEN))
def test_a_mistake_is_caught_and_named(name: str) -> None:
    entry = BROKEN[name]
    verification = verified(name)
    causes = [
        check.cause
        for check in verification.failed
        if (check.subject, check.case) == (entry.subject, entry.case)
    ]
    assert not verification.ok
    assert len(causes) == 1, [(check.subject, check.case) for check in verification.failed]
    for words in entry.words:
        assert words in causes[0]


@pytest.mark.promise("verify.no-false-alarm")
@pytest.mark.parametrize("name", only(["masked", "raw_key_in_state"], CORRECT))
def test_a_correct_step_raises_no_alarm(name: str) -> None:
    assert verified(name).failed == []
