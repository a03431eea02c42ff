"""`fit` in a job of two processes: they decide, record and print as one."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from support.processes import SUPPORT, Ended, run_job
from support.tiers import EXHAUSTIVE, only


def fit(folder: Path, steps: str, interrupted: str = "nobody") -> list[Ended]:
    return run_job(SUPPORT / "job_fit.py", steps, folder, interrupted)


def said(ended: Ended) -> dict[str, Any]:
    assert ended.code == 0, ended.err
    result: dict[str, Any] = json.loads(ended.out.splitlines()[-1])
    return result


def test_processes_end_alike_and_process_0_speaks_for_all(folder: Path) -> None:
    first, second = fit(folder, "40,40")
    assert said(first) == said(second)
    assert said(first)["steps"] == 40
    assert re.search(r"2 cpu devices.*\b2 processes", first.out)
    own = [line for line in second.out.splitlines() if "Gloo" not in line]
    assert len(own) == 1
    assert ("ALARM" in first.err, "process 1: ALARM  hook FailsIn" in second.err) == (False, True)
    config = json.loads((folder / "run" / "config.json").read_text())
    assert config["parallel"]["processes"] == 2
    records = (folder / "run" / "records.jsonl").read_text().splitlines()
    assert [json.loads(record)["kind"] for record in records].count("eval") == 10


@EXHAUSTIVE
def test_the_process_that_is_late_is_named(folder: Path) -> None:
    first, second = fit(folder, "110,110", "late")
    assert said(first) == said(second)
    [line] = [line for line in first.out.splitlines() if "process 1" in line]
    own, others = (float(number) for number in re.findall(r"([\d.]+) ms", line)[:2])
    assert own >= 50
    assert own > others
    assert "process 1 (" not in second.out
    assert not said(first)["collects"]


@pytest.mark.parametrize("process", only(["1"], ["0", "1"]))
def test_ctrl_c_in_one_process_stops_all_after_the_same_step(folder: Path, process: str) -> None:
    first, second = fit(folder, "1000000,1000000", process)
    assert said(first) == said(second)
    assert said(first)["interrupted"]
    assert 20 <= said(first)["steps"] < 1_000_000


@pytest.mark.promise("faults.another-number-of-steps")
@EXHAUSTIVE
def test_a_different_number_of_steps_stops_all_before_the_first(folder: Path) -> None:
    for ended in fit(folder, "40,41"):
        assert ended.code == 2
        assert "steps is 41 on process 1, 40 on process 0" in ended.err.splitlines()[-1]
    assert not (folder / "run").exists()
