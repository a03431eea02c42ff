"""Outcomes of trials in a table, and in a file that adds them up."""

import dataclasses
import json
from pathlib import Path

import pytest
from chaos.islands.rounds import ROUND_FAULTS
from chaos.results import IslandsOutcome, Outcome, RunOutcome, add_to_file, table
from chaos.runs.faults import FAULTS

USUAL = {"seed": 1, "how": "kill 0 at step 3", "missed": False, "equal": True, "starts": 4}
USUAL |= {"recovery_seconds": [0.5, 12.25], "seconds": 3.0, "cpu_seconds": 4.0, "wrong": []}
OF_A_RUN = RunOutcome(**USUAL, fault="kill-restoring", processes=2, lost=[0, 8])
OF_ISLANDS = IslandsOutcome(
    **USUAL,
    fault="kill-unproven",
    islands=3,
    hung=False,
    left=1,
    usual_step_seconds=0.02,
    join_seconds=[0.1],
)


@pytest.mark.parametrize(
    ("outcome", "cells"),
    [
        (OF_A_RUN, ["9999", "9999", "9999", "8", "4.0", "6.38", "12.25"]),
        (OF_ISLANDS, ["9999", "0", "0", "9999", "6375", "12250", "12250", "100"]),
    ],
)
def test_the_table_fits_a_terminal(outcome: Outcome, cells: list[str]) -> None:
    another = dataclasses.replace(outcome, fault="kill", missed=True)
    lines = list(table([outcome] * 9_999 + [another]))
    assert all(len(line) <= 80 for line in lines)
    assert [line.split()[0] for line in lines[:-1]] == ["fault", "kill", outcome.fault, "all"]
    assert lines[2].split() == [outcome.fault, *cells]
    assert "1" in lines[-1].split()


def test_a_failed_trial_tells_how_to_repeat_it() -> None:
    failed = dataclasses.replace(OF_ISLANDS, wrong=["step is 3", "hung"], rounds=True)
    line = failed.line()
    assert line.startswith("FAILED kill-unproven 1: 3 islands, 4 starts, 1 left,")
    assert "500,12250 ms, 3.0 s (kill 0 at step 3): step is 3; hung" in line
    assert line.endswith("[--rounds --faults kill-unproven --seed 1 --trials 1]")
    assert dataclasses.replace(OF_ISLANDS, missed=True).line().startswith("ok")


def test_a_file_of_results_adds_up(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    for differs in (
        {},
        {"wrong": ["step is 3"], "equal": False, "recovery_seconds": [1.0]},
        {"fault": "kill", "missed": True},
    ):
        add_to_file(path, dataclasses.replace(OF_ISLANDS, **differs), {"cores": 2})
    told = json.loads(path.read_text())
    counted = {"runs": 2, "failures": 1, "hangs": 0, "unequal": 1, "restarts": 3, "left": 3}
    assert told["all"] == counted
    assert told["faults"]["kill-unproven"]["recovery_ms"] == {
        "median": 1000,
        "p95": 12250,
        "max": 12250,
    }
    assert told["faults"]["kill"]["missed"] == 1


def test_every_fault_is_told() -> None:
    for faults in (FAULTS, ROUND_FAULTS):
        assert all(fault.what and len(name) <= 14 for name, fault in faults.items())
