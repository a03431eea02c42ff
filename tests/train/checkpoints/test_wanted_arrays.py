"""A checkpoint with other arrays than the run is told apart from a damaged one."""

import re

import pytest
from support.saved_checkpoint import entries, tree

from replicax.errors import CheckpointError
from replicax.train.checkpoints.manifest import ArrayEntry
from replicax.train.checkpoints.store import check_arrays

SAVED = entries(tree())


def refusal(wanted: dict[str, ArrayEntry]) -> str:
    """Return why a run that needs these arrays is refused, in one line."""
    with pytest.raises(CheckpointError) as refused:
        check_arrays(SAVED, wanted)
    reason = str(refused.value)
    assert reason.isprintable()
    return reason


def test_other_names_than_the_run_has() -> None:
    wanted = dict(SAVED)
    del wanted["seed"]
    assert re.search(r"\bseed is .*\bnot in\b.*\brun: ", refusal(wanted))
    wanted = {**SAVED, "params.more": ArrayEntry("int8", ())}
    assert re.search(r"\bparams\.more is .*\brun\b.*\bnot in\b", refusal(wanted))
    wanted = {**SAVED, "params.dense.kernel": ArrayEntry("float32", (96, 64))}
    assert re.search(r"^params\.dense\.kernel .*\[64, 96\].*\[96, 64\]", refusal(wanted))


def test_three_differences_are_named_and_the_others_counted() -> None:
    reason = refusal({})
    assert len(re.findall(r"is in\b[^,;:]*\bnot in\b[^,;:]*\brun\b", reason)) == 3
    assert f"; and {len(SAVED) - 3} more: " in reason
    three = dict.fromkeys(sorted(SAVED)[-3:], ArrayEntry("int8", ()))
    assert " more" not in refusal({**SAVED, **three})
