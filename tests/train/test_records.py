"""Records: one JSON object in each line, and one folder for each run."""

import errno
import json
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from replicax.train.files import places
from replicax.train.files.records import Record, RunFolder, read_records

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


def record(**changes: Any) -> Record:
    fields: dict[str, Any] = {
        "kind": "train",
        "step": 3,
        "epoch": 0,
        "metrics": {"loss": 0.5, "accuracy": 0.75},
        "rows": 96,
        "seconds": 1.5,
        "input_wait_fraction": 0.25,
    }
    return Record(**{**fields, **changes})


def strict(text: str) -> Any:
    """Parse standard JSON, without Python's NaN and Infinity."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    return json.loads(text, parse_constant=refuse)


def test_a_record_is_one_line_of_json() -> None:
    line = record(step=np.int64(3), figures={"x": np.float32(0.5)}).to_json()
    assert "\n" not in line
    assert strict(line) == {
        "kind": "train",
        "step": 3,
        "epoch": 0,
        "metrics": {"loss": 0.5, "accuracy": 0.75},
        "rows": 96,
        "seconds": 1.5,
        "input_wait_fraction": 0.25,
        "rows_per_second": 64.0,
        "figures": {"x": 0.5},
    }
    assert strict(record(seconds=0.0).to_json())["rows_per_second"] is None


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_becomes_null(value: float) -> None:
    written = strict(record(metrics={"loss": value, "accuracy": 1.0}).to_json())
    assert written["metrics"] == {"loss": None, "accuracy": 1.0}


def test_the_config_is_json_and_what_json_does_not_know_is_text(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.write_config(
        {"path": Path("a/b"), "rate": 0.1, "clip": math.inf, "tags": {"c", "a", "b"}}
    )
    text = (tmp_path / "run" / "config.json").read_text()
    found = strict(text)
    assert list(found) == ["path", "rate", "clip", "tags", "checksum"]
    del found["checksum"]
    assert found == {"path": "a/b", "rate": 0.1, "clip": None, "tags": ["a", "b", "c"]}


def about(live: int, step: int) -> Record:
    metrics = {"live": float(live), "joined": 0.0, "left": 1.0}
    return record(kind="islands", step=step, metrics=metrics, rows=0)


@pytest.mark.parametrize(
    ("file", "own", "after"),
    [
        # The dead was ahead, or behind, or neither.
        ([1, 2, 3], [1, 2], [1, 2]),
        ([1, 2], [1, 2, 3], [1, 2, 3]),
        ([1, about(2, 1), 2], [1, about(2, 1), 2], [1, about(2, 1), 2]),
        # Only one of them has noted a loss, or each at another place.
        ([1, about(2, 1), 2, 3], [1, 2, 3], [1, about(2, 1), 2, 3]),
        ([1, 2], [1, 2, about(2, 2)], [1, 2, about(2, 2)]),
        ([1, 2, about(2, 2)], [1, 2, about(2, 2), about(1, 2)], [1, 2, about(2, 2), about(1, 2)]),
        ([1, about(2, 1), 2], [1, 2, about(2, 2), 3], [1, about(2, 1), 2, about(2, 2), 3]),
        ([], [about(3, 0), 1], [about(3, 0), 1]),
        # A line is damaged, the last or another one.
        ([1, None, 3], [1, 2, 3, 4], [1, 2, 3, 4]),
        ([1, about(2, 1), None], [1, about(2, 1), 2], [1, about(2, 1), 2]),
    ],
)
def test_the_next_writer_loses_and_doubles_no_record(
    tmp_path: Path, file: list[Any], own: list[Any], after: list[Any]
) -> None:
    def written(step: Any) -> Record:
        return step if isinstance(step, Record) else record(step=step)

    lines = ["damaged" if each is None else written(each).to_json() for each in file]
    (tmp_path / "records.jsonl").write_text("".join(f"{line}\n" for line in lines))
    folder = RunFolder(tmp_path)
    folder.take_over([written(each) for each in own], lambda: True)
    found = read_records(tmp_path, 100).records
    assert found == [written(each) for each in after]


def test_a_line_that_a_kill_cut_off_goes_with_what_comes_after_it(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.append(record(step=1))
    folder.append(record(step=3))
    whole = (tmp_path / "records.jsonl").read_bytes()
    (tmp_path / "records.jsonl").write_bytes(whole[:-7])
    again = RunFolder(tmp_path)
    assert (len((kept := again.keep(1)).records), kept.reached, kept.damaged) == (1, 0, False)
    again.append(record(step=3))
    assert (tmp_path / "records.jsonl").read_bytes() == whole


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary() | st.text().map(str.encode) | JSON.map(lambda x: json.dumps(x).encode()))
def test_what_is_no_record_is_left_out_and_told(tmp_path: Path, line: bytes) -> None:
    (tmp_path / "records.jsonl").write_bytes(line)
    found = read_records(tmp_path, 1)
    assert (found.records, len(found.faults)) == ([], 1)
    assert found.faults[0].isprintable()


@pytest.mark.promise("outside.full-disk")
def test_damaged_lines_are_copied_and_the_others_kept(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    for step in range(1, 6):
        folder.append(record(step=step))
    path = tmp_path / "records.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([lines[0], b"[" * 100_000 + b"\n", *lines[2:]]))
    found = RunFolder(tmp_path).keep(4, folder.digest)
    assert ([each.step for each in found.records], found.damaged) == ([1, 3, 4], True)
    assert "1 of 4" in found.faults[0]
    assert path.read_bytes() == b"".join([lines[0], *lines[2:4]])
    assert b"[[[" in (tmp_path / "records-damaged.jsonl").read_bytes()


@pytest.mark.promise("outside.full-disk")
def test_a_disk_that_is_full_for_a_moment_costs_no_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk takes a part of a line, then nothing, then everything."""
    folder, room = RunFolder(tmp_path), [10**6]
    regular = places._regular

    class Filling:
        def __init__(self, file: Any) -> None:
            self.file = file

        def __enter__(self) -> "Filling":
            return self

        def __exit__(self, *_: object) -> None:
            self.file.close()

        def __getattr__(self, name: str) -> Any:
            return getattr(self.file, name)

        def write(self, data: bytes) -> int:
            if not room[0]:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            written: int = self.file.write(data[: room[0]])
            room[0] -= written
            return written

    monkeypatch.setattr(places, "_regular", lambda *given: Filling(regular(*given)))
    folder.append(record(step=1))
    room[0] = 25
    folder.append(record(step=2))
    assert os.strerror(errno.ENOSPC) in str(folder.fault)
    folder.append(record(step=3))
    assert folder.fault is None, "told once"
    room[0] = 10**6
    folder.append(record(step=4))
    assert folder.unwritten is None
    assert [each.step for each in read_records(tmp_path, 4, folder.digest).records] == [1, 2, 3, 4]
