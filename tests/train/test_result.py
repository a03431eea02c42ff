"""The result of a run in one line."""

import math
from typing import Any

import pytest

from replicax.train.files.records import Record
from replicax.train.run.summary import Fit


def fit(**more: Any) -> Fit:
    state: Any = None
    given = {"records": [], "steps": 20, "rows": 1280, "seconds": 75.0, "interrupted": False}
    return Fit(**{"state": state, "step": 120, **given, **more})


def record(kind: str, **metrics: float) -> Record:
    return Record(kind, 120, 0, metrics, 64, 1.0)


@pytest.mark.parametrize(
    ("result", "shown"),
    [
        (fit(), "Fit(step=120, 1,280 rows in 1 min 15 s)"),
        (
            fit(records=[record("train", loss=0.123456)], interrupted=True),
            "Fit(stopped early, step=120, 1,280 rows in 1 min 15 s, loss 0.1235)",
        ),
        (
            fit(records=[record("eval", top1=0.5, top5=0.75, loss=math.nan), record("train")]),
            "Fit(step=120, 1,280 rows in 1 min 15 s, loss nan, top1 0.5)",
        ),
    ],
)
def test_a_result_is_one_line(result: Fit, shown: str) -> None:
    assert repr(result) == shown
