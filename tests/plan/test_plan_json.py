"""Plans as JSON."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from plan.plans import ABOUT, KINDS, SPEED, make_plan, plan_of


def test_every_kind_of_plan_has_the_same_keys() -> None:
    plains = [plan_of(kind).to_json() for kind in KINDS]
    assert all(list(plain) == list(plains[0]) for plain in plains)
    for part in ("asked", "formula", "target"):
        assert len({tuple(plain[part]) for plain in plains}) == 1


def test_json_has_the_numbers_and_what_follows() -> None:
    plan = make_plan()
    plain = plan.to_json()
    assert plain["fits"] is True
    assert (plain["asked"]["rows"], plain["asked"]["bytes"]) == (8, 11 * 10**9)
    assert plain["formula"]["total"] == plan.formula.total
    assert set(plain["target"]["chip"]["sources"]) >= {"memory_bytes", "flops_per_second"}
    assert plain["traffic"]["share"] == pytest.approx(2.0, rel=1e-3)
    one, *_, last = plain["scaling"]["weak"]
    assert (one["devices"], one["efficiency"], one["batch_size"]) == (1, 1.0, 8)
    assert last["devices"] == 131_072
    assert last["rows_per_second"] == pytest.approx(8 * 131_072 / last["step"]["seconds"])


def test_what_json_does_not_have_is_turned_into_what_it_has() -> None:
    about: dict[Any, Any] = {
        **ABOUT,
        "noise_scale": float("inf"),
        "learning_rate": float("nan"),
        "count": np.int64(3),
        "scores": np.asarray([1.5, np.inf]),
        "a": {1: (2, 3)},
        "folder": Path("runs"),
    }
    rates = dataclasses.replace(SPEED, rows_per_second=float("inf"))
    plain = make_plan(about=about, speeds=(rates,)).to_json()
    json.dumps(plain, allow_nan=False)
    found = plain["about"]
    assert found["noise_scale"] is None
    assert found["learning_rate"] is None
    assert found["count"] == 3
    assert found["scores"] == [1.5, None]
    assert found["a"] == {"1": [2, 3]}
    assert found["folder"] == "runs"
    assert plain["speeds"][0]["rows_per_second"] is None
