"""Records: one JSON object a line, and a folder for each run."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from replicax.errors import ConfigError
from replicax.train.records import Record, RunFolder, read_records

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
    """JSON as the standard has it, without Python's NaN and Infinity."""

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
    folder.write_config({"path": Path("a/b"), "rate": 0.1, "none": None})
    text = (tmp_path / "run" / "config.json").read_text()
    assert strict(text) == {"path": "a/b", "rate": 0.1, "none": None}


def test_the_config_has_null_for_what_is_not_finite(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.write_config({"fields": {"clip": math.inf}})
    assert strict((tmp_path / "run" / "config.json").read_text()) == {"fields": {"clip": None}}


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


def test_what_is_to_be_done_again_is_taken_out(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    assert folder.keep(3) == (0, 0)
    for step in (1, 3, 5, 7):
        folder.append(record(step=step))
    assert folder.keep(2) == (2, 7)
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


def test_a_line_that_a_kill_cut_off_goes_with_what_comes_after_it(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.append(record(step=1))
    folder.append(record(step=3))
    whole = (tmp_path / "records.jsonl").read_bytes()
    (tmp_path / "records.jsonl").write_bytes(whole[:-7])
    again = RunFolder(tmp_path)
    assert again.keep(1) == (1, 0)
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
    assert read_records(tmp_path, 3) == written
    assert read_records(tmp_path, 2) == written[:2]
    assert read_records(tmp_path, 0) == []


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary() | st.text().map(str.encode) | JSON.map(lambda x: json.dumps(x).encode()))
def test_what_is_no_record_is_refused_in_one_line(tmp_path: Path, line: bytes) -> None:
    (tmp_path / "records.jsonl").write_bytes(line)
    said = ""
    try:
        read_records(tmp_path, 1)
    except ConfigError as error:
        said = str(error)
    assert said == "" or said.startswith("line 1 of ")
    assert "\n" not in said
