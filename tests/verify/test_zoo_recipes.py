"""Every broken recipe of the zoo is caught, with its cause; no correct one is."""

from collections.abc import Iterable

import pytest
from verify.zoo_recipes import BROKEN, CORRECT, NOTED

QUICK = ("reduced by hand",)


def marked(names: Iterable[str]) -> list[object]:
    return [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in names]


@pytest.mark.parametrize("name", marked(BROKEN))
def test_broken_is_caught(name: str) -> None:
    entry = BROKEN[name]
    verification = entry.verify(modes=["jit", "shard_map"])
    assert not verification.ok
    said = [f"{check.found} {check.cause}" for check in verification.failed]
    assert any(entry.words in text for text in said), said


@pytest.mark.slow
@pytest.mark.parametrize("name", CORRECT)
def test_correct_passes(name: str) -> None:
    verification = CORRECT[name].verify()
    assert verification.ok, [
        f"{check.subject}, {check.case}: {check.found} {check.cause}"
        for check in verification.failed
    ]
    if name in NOTED:
        said = [f"{check.found} {check.cause}" for check in verification.checks]
        assert any(NOTED[name] in text for text in said), said
