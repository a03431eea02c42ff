"""Every broken recipe is found with its cause, and no correct one is."""

import pytest
from support.tiers import EXHAUSTIVE, only
from verify.zoo_recipes import BROKEN, CORRECT

USUAL = ("mean of means, shard_map", "fixed seed")


@pytest.mark.promise("verify.mistakes-are-named")
@pytest.mark.parametrize("name", only(USUAL, BROKEN))
def test_broken_is_caught(name: str) -> None:
    entry = BROKEN[name]
    verification = entry.verify(modes=["jit", "shard_map"])
    assert not verification.ok
    said = [f"{check.found} {check.cause}" for check in verification.failed]
    assert any(entry.words in text for text in said), said


@EXHAUSTIVE
@pytest.mark.parametrize("name", CORRECT)
def test_correct_passes(name: str) -> None:
    verification = CORRECT[name].verify()
    assert verification.ok, [
        f"{check.subject}, {check.case}: {check.found} {check.cause}"
        for check in verification.failed
    ]
    said = [f"{check.found} {check.cause}" for check in verification.checks]
    for words in CORRECT[name].noted:
        assert any(words in text for text in said), said
