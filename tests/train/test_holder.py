"""A lease's holder: what its file must say, and whether its process still runs."""

import json
from typing import Any

import pytest

from replicax.train.holder import Holder, parse_holder


def fields(**changes: Any) -> dict[str, Any]:
    return {**json.loads(Holder.this_process(1).to_json()), **changes}


@pytest.mark.parametrize(
    "changes",
    [
        {"token": 2},
        {"token": True},
        {"token": 1.0},
        {"host": ""},
        {"host": "h\x1b[2J"},
        {"host": "a\nb"},
        {"host": "h" * 256},
        {"host": None},
        {"boot_id": 3},
        {"pid": -1},
        {"pid": "1"},
        {"pid": True},
        {"pid": 2**63},
        {"process_started": 1.5},
        {"started_at": 1e300},
        {"started_at": float("nan")},
        {"started_at": -1},
        {"started_at": None},
        {"more": 1},
    ],
)
def test_a_holder_with_a_wrong_field_is_none(changes: dict[str, Any]) -> None:
    assert parse_holder(json.dumps(fields()).encode(), 1) is not None
    assert parse_holder(json.dumps(fields(**changes)).encode(), 1) is None


def test_a_process_id_that_came_again_is_not_the_holder() -> None:
    own = Holder.this_process(1)
    if own.process_started is None:
        pytest.skip("this system does not tell when a process began")
    earlier = parse_holder(json.dumps(fields(process_started=own.process_started - 1)).encode(), 1)
    assert own.is_running
    assert earlier is not None
    assert not earlier.is_running
