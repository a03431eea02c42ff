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

from replicax.errors import ConfigError
from replicax.train import places
from replicax.train.records import History, Record, RunFolder, read_records

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
    line = record().to_json()
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
    }


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_becomes_null(value: float) -> None:
    written = strict(record(metrics={"loss": value, "accuracy": 1.0}).to_json())
    assert written["metrics"] == {"loss": None, "accuracy": 1.0}


def test_a_record_without_time_has_no_rate() -> None:
    first = record(seconds=0.0, input_wait_fraction=None)
    assert math.isnan(first.rows_per_second)
    assert strict(first.to_json())["rows_per_second"] is None


def test_records_are_visible_as_they_come(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "deep" / "run")
    for step in (1, 2):
        folder.append(record(step=step))
        lines = (tmp_path / "deep" / "run" / "records.jsonl").read_text().splitlines()
        assert [strict(line)["step"] for line in lines] == list(range(1, step + 1))


def test_the_config_is_json_and_what_json_does_not_know_is_text(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.write_config({"path": Path("a/b"), "rate": 0.1, "none": None, "tags": {"c", "a", "b"}})
    text = (tmp_path / "run" / "config.json").read_text()
    found = strict(text)
    assert list(found) == ["path", "rate", "none", "tags", "checksum"]
    del found["checksum"]
    assert found == {"path": "a/b", "rate": 0.1, "none": None, "tags": ["a", "b", "c"]}


def test_the_config_has_null_for_what_is_not_finite(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.write_config({"fields": {"clip": math.inf}})
    assert strict((tmp_path / "run" / "config.json").read_text())["fields"] == {"clip": None}


def test_a_folder_with_another_run_is_refused_and_left_alone(tmp_path: Path) -> None:
    first = RunFolder(tmp_path / "run")
    first.append(record())
    with pytest.raises(ConfigError, match=r"another run\b.*another name") as caught:
        RunFolder(tmp_path / "run").refuse_another("it is old")
    assert str(tmp_path / "run") in str(caught.value)
    assert len((tmp_path / "run" / "records.jsonl").read_text().splitlines()) == 1


def test_an_empty_folder_is_taken(tmp_path: Path) -> None:
    for _ in range(2):  # a run without a record leaves its name free
        folder = RunFolder(tmp_path)
        folder.refuse_another("it is old")
        folder.write_config({})
    assert not (tmp_path / "records.jsonl").exists()


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    for path in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(ConfigError, match=rf"{tmp_path}/file.*\bwritten\b") as caught:
            RunFolder(path)
        assert str(path) in str(caught.value)


def test_records_of_steps_to_repeat_are_removed(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    assert folder.keep(3).records == []
    for step in (1, 3, 5, 7):
        folder.append(record(step=step))
    kept = folder.keep(2)
    assert ([each.step for each in kept.records], kept.reached, kept.faults) == ([1, 3], 7, [])
    folder.append(record(kind="restore", step=3))
    folder.append(record(step=5))
    lines = (tmp_path / "records.jsonl").read_text().splitlines()
    assert [(strict(line)["kind"], strict(line)["step"]) for line in lines] == [
        ("train", 1),
        ("train", 3),
        ("restore", 3),
        ("train", 5),
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["records.jsonl"]


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


def test_records_are_read_as_they_were_written(tmp_path: Path) -> None:
    written = [
        record(step=1, metrics={"loss": 0.1}),
        record(kind="eval", step=2, metrics={"loss": 1 / 3, "accuracy": 0.5}),
        record(kind="skip", step=3, metrics={"loss": 2.0}, examples=(3, 1, 2)),
    ]
    folder = RunFolder(tmp_path)
    for each in written:
        folder.append(each)
    assert read_records(tmp_path, 3, folder.digest) == History(
        written, (tmp_path / "records.jsonl").read_bytes(), 0, []
    )
    assert read_records(tmp_path, 2).records == written[:2]
    assert read_records(tmp_path, 0).records == []


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


def test_a_changed_number_is_told_and_kept(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.append(record())
    path = tmp_path / "records.jsonl"
    path.write_bytes(path.read_bytes().replace(b"0.75", b"0.95"))
    again = RunFolder(tmp_path)
    found = again.keep(1, folder.digest)
    assert (found.records[0].metrics["accuracy"], found.damaged) == (0.95, True)
    assert again.keep(1, again.digest).faults == []


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


def test_numbers_of_other_libraries_are_numbers() -> None:
    found = record(step=np.int64(3), metrics={"loss": np.float32(0.5)}, figures={"x": np.int8(1)})
    assert strict(found.to_json())["figures"] == {"x": 1.0}
    with pytest.raises(TypeError):
        record(metrics={"loss": [1.0, 2.0]})
