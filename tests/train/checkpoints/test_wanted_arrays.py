"""A checkpoint with other arrays than the run is told apart from a damaged one."""

import re

import pytest
from support.figures import assert_mentions
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


def test_the_same_arrays_are_accepted_in_any_order() -> None:
    check_arrays(SAVED, dict(reversed(SAVED.items())))
    check_arrays({}, {})


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        (ArrayEntry("float32", (64, 95)), ["float32[64, 96]", "float32[64, 95]"]),
        (ArrayEntry("float32", (96, 64)), ["float32[64, 96]", "float32[96, 64]"]),
        (ArrayEntry("int32", (64, 96)), ["float32[64, 96]", "int32[64, 96]"]),
    ],
)
def test_another_array_than_the_run_has(entry: ArrayEntry, said: list[str]) -> None:
    reason = refusal({**SAVED, "params.dense.kernel": entry})
    assert reason.startswith("params.dense.kernel ")
    assert_mentions(reason, *said)


def test_other_names_than_the_run_has() -> None:
    wanted = dict(SAVED)
    del wanted["seed"]
    assert re.search(r"\bseed is .*\bnot in\b.*\brun: ", refusal(wanted))
    wanted = {**SAVED, "params.more": ArrayEntry("int8", ())}
    assert re.search(r"\bparams\.more is .*\brun\b.*\bnot in\b", refusal(wanted))


def test_three_differences_are_named_and_the_others_counted() -> None:
    reason = refusal({})
    assert len(re.findall(r"is in\b[^,;:]*\bnot in\b[^,;:]*\brun\b", reason)) == 3
    assert f"; and {len(SAVED) - 3} more: " in reason
    three = dict.fromkeys(sorted(SAVED)[-3:], ArrayEntry("int8", ()))
    assert " more" not in refusal({**SAVED, **three})
