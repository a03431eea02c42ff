"""Examples with an `rx.Run`, killed again and again, end as if undisturbed."""

import json
import random
import signal
from pathlib import Path
from typing import Any

import pytest
from support.examples import FOLDER
from support.processes import SUPPORT, run_job
from support.resumable import written
from support.tiers import EXHAUSTIVE, only

STEPS = {"ema_teacher": 60, "wgan_gp": 120, "seq2seq": 60}
"""Enough steps for several evaluations and saves."""
KILLS = 6


def start(name: str, run: Path, step: int = 0, seconds: float = 0.0) -> tuple[int, Any]:
    """The exit code, and what a start that was not killed printed last."""
    flags = ("--run-dir", run, "--steps", STEPS[name])
    command = (SUPPORT / "job_example.py", FOLDER / f"{name}.py", step, seconds, *flags)
    (ended,) = run_job(*command, processes=1, devices=2)
    if ended.code == -signal.SIGKILL:
        return ended.code, None
    assert ended.code == 0, ended.err
    return 0, json.loads(ended.out.splitlines()[-1])


@EXHAUSTIVE
@pytest.mark.parametrize("name", only([], STEPS, sampled=["wgan_gp"]))
def test_a_killed_run_ends_as_if_nothing_had_happened(name: str, tmp_path: Path) -> None:
    _, wanted = start(name, tmp_path / "whole")
    drawn = random.Random(f"{name} {KILLS}")
    span = STEPS[name] // KILLS
    for number in range(KILLS):  # each kill comes before a step that the start before did not reach
        step = number * span + drawn.randint(1, span)
        seconds = drawn.uniform(0.05, 4.0) if number % 2 else 0.0
        code, _ = start(name, tmp_path / "killed", step, seconds)
        assert code == -signal.SIGKILL
    _, found = start(name, tmp_path / "killed")
    assert found == wanted
    assert wanted["failed"] == []
    assert all(wanted["hooks"].values())
    assert written(tmp_path / "killed") == written(tmp_path / "whole") == wanted["records"]
