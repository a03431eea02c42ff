"""The row on fixed bits: where they differ."""

import dataclasses

import pytest

from replicax.core.modes.mode_table import MODES
from replicax.text.checks import Check
from replicax.verify.exactness import Bits, check_exactness

SAME = Bits([{"w": "00", "b": "01"}, {"w": "02", "b": "03"}], {"step.0": "aa", "step.1": "bb"})


def row(bits: dict[int, Bits], is_own: bool = True) -> Check:
    exact = MODES["exact"]
    return check_exactness(exact, list(bits), bits.__getitem__, is_own)


@pytest.mark.promise("exact.digests-are-compared")
@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"steps": [SAME.steps[0], {"w": "02", "b": "ff"}]}, ["step 2", "b of 1", "equal"]),
        ({"steps": [{"w": "09", "b": "08"}, SAME.steps[1]]}, ["step 1", "w of 2", "equal"]),
        (
            {"steps": [SAME.steps[0], {"w": "0f", "b": "03"}], "programs": {"step.0": "aa"}},
            ["on 2 devices", "step 2", "w of 1", "step.1"],
        ),
        ({"programs": {"step.0": "aa", "step.1": "cc"}}, ["on 2 devices"]),
    ],
)
def test_other_bits_name_step_leaf_and_program(changes: dict, named: list[str]) -> None:
    found = row({1: SAME, 2: dataclasses.replace(SAME, **changes), 4: SAME})
    assert found.verdict == "fail"
    assert all(each in found.found for each in named)


def test_bits_of_a_mode_that_is_not_trained_in_are_a_note() -> None:
    other = dataclasses.replace(SAME, steps=[{"w": "09", "b": "08"}, SAME.steps[1]])
    assert row({1: SAME, 2: other}, is_own=False).verdict == "note"
