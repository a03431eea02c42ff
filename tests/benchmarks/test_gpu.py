"""`benchmarks/gpu.py` where there is no GPU: its queue, and every part in sizes for a CPU."""

import importlib.util
import json
import math
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from support.tiers import EXHAUSTIVE, only
from support.waiting import until

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
EVERY_SCRIPT = [
    *("ceilings", "gpt2, single", "by hand", "exact", "GPT-2", "overhead"),
    "lenet",
]
"""Names that leave out parts which run the script of another one with another model or mode."""


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("gpu")


def answer(gpu: ModuleType, program: str, limit: float = 30) -> dict[str, Any]:
    return gpu.answer_of([sys.executable, "-c", program], dict(os.environ), limit)


def test_the_last_line_is_the_answer(gpu: ModuleType) -> None:
    assert answer(gpu, "print('more'); print('{\"ms\": 1.5}')") == {"ms": 1.5}


def test_a_part_that_crashes_tells_why(gpu: ModuleType) -> None:
    row = answer(gpu, "raise ValueError('no kernel')")
    assert row["error"] == "exited with 1: ValueError: no kernel"


def test_a_part_that_says_nothing_has_failed(gpu: ModuleType) -> None:
    assert answer(gpu, "")["error"] == "exited with 0: no output"


@EXHAUSTIVE
def test_a_part_that_hangs_is_ended_with_all_that_it_started(
    gpu: ModuleType, tmp_path: Path
) -> None:
    started = tmp_path / "pid"
    child = f"echo $$ >{started}; sleep 600"
    program = f"import subprocess; subprocess.run(['sh', '-c', {child!r}])"
    assert answer(gpu, program, limit=2)["error"].split(" in ") == ["no answer", "2 s"]
    if started.exists():  # or even that took longer
        until(lambda: not is_running(int(started.read_text())))


def is_running(process: int) -> bool:
    """Return whether it runs; a zombie has ended."""
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def test_nothing_is_begun_without_time(gpu: ModuleType) -> None:
    part = gpu.Part("hangs", 60, ("no_such_script.py",))
    row = gpu.run(part, [], {}, time.monotonic() + gpu.LEAST_SECONDS - 1)
    assert (set(row), row["seconds"]) == ({"left_out", "seconds"}, 0.0)
    assert "no time" in row["left_out"]


def test_other_losses_are_told(gpu: ModuleType) -> None:
    def contender(*losses: float) -> dict[str, Any]:
        row = {"tokens_per_second": 1, "rows": 8, "vocabulary": 257, "tolerances": [0.01, 0.03]}
        return {**row, "losses": losses}

    parts = {"one": contender(5.0, 4.0), "two": contender(5.0, 4.02), "lost": {"error": "x"}}
    assert not gpu.disagreements(parts)
    (line,) = gpu.disagreements({**parts, "three": contender(5.0, math.nan)})
    assert line.startswith("three: ")


@EXHAUSTIVE
def test_without_a_gpu_nothing_is_measured(tmp_path: Path) -> None:
    done = run_gpu("--out", tmp_path)
    assert done.returncode == 1
    assert re.search(r"no GPU .*but cpu; --tiny", done.stderr)
    assert not (tmp_path / "gpu.json").exists()


@pytest.mark.parametrize("names", only((), [EVERY_SCRIPT, [""]], sampled=[EVERY_SCRIPT]))
def test_every_part_gives_figures(names: list[str], tmp_path: Path) -> None:
    chosen = [f"--only={name}" for name in names]
    done = run_gpu("--tiny", "--out", tmp_path, "--budget", 1200, *chosen)
    result = json.loads((tmp_path / "gpu.json").read_text())
    assert done.returncode == 0, done.stdout
    for name, row in result["parts"].items():
        assert sum(isinstance(value, float) for value in row.values()) > 1 or lacks(row), name
    (exact,) = (row for name, row in result["parts"].items() if name.endswith("mode exact"))
    assert exact["different digests"] == 1
    (kernels,) = (row["kernels"] for row in result["parts"].values() if "profile" in row)
    assert kernels
    table = done.stdout[done.stdout.index("\n\n") :].splitlines()
    assert "gpt2, single" not in table
    assert max(map(len, table[:-1])) <= 80  # the last is a path


def lacks(row: dict[str, Any]) -> bool:
    """Return whether a part was skipped for a valid reason, or has digests as figures."""
    missing = {"has no torch": "torch", "no compiler to plan with": "jax_cuda13_plugin"}
    if "different digests" in row:
        return True
    (module,) = (module for text, module in missing.items() if text in row["left_out"])
    return importlib.util.find_spec(module) is None


def run_gpu(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(BENCHMARKS / "gpu.py"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True)
