"""A run resumed in another number of processes."""

import json
from pathlib import Path

import numpy as np
import pytest
from support.processes import SUPPORT, Ended, run_job
from support.tiers import EXHAUSTIVE

STEPS, STOP = 200, 100


def job(folder: Path, mode: str, stop: int, processes: int) -> list[Ended]:
    folder.mkdir(exist_ok=True)
    arguments = [SUPPORT / "job_resume.py", folder, mode, STEPS, stop]
    return run_job(*arguments, processes=processes, devices=2 // processes)


def used(folder: Path) -> list[tuple[int, list[int]]]:
    told = [json.loads(line) for line in (folder / "told.jsonl").read_text().splitlines()]
    return [(each["step"], each["examples"]) for each in told]


@EXHAUSTIVE
@pytest.mark.parametrize("mode", ["jit", "exact"])
@pytest.mark.parametrize("first", [1, 2])
def test_one_process_and_two_are_one_run(tmp_path: Path, mode: str, first: int) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    then = 3 - first
    for ended in job(whole, mode, 0, first):
        assert ended.code == 0, ended.err
    for ended in job(parts, mode, STOP, first):
        assert ended.code == 75, ended.err
    for ended in job(parts, mode, 0, then):
        assert ended.code == 0, ended.err
    assert [step for step, _ in used(whole)] == list(range(1, STEPS + 1))
    assert used(parts) == used(whole)
    expected, found = np.load(whole / "params.npz"), np.load(parts / "params.npz")
    apart = max(np.abs(expected[name] - found[name]).max() for name in expected.files)
    print(f"{mode}, {first} then {then} processes: {apart:.2e} apart after {STEPS} steps")
    assert apart == 0 if mode == "exact" else apart < 1e-6
