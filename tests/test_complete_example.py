"""`examples/complete`: a script as users write it, killed, resumed, and opened with Orbax alone."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from support.tiers import EXHAUSTIVE

FOLDER = Path(__file__).resolve().parents[1] / "examples/complete"
OPENED = """
import sys
sys.path.insert(0, sys.argv[1])
import numpy as np, opened
step, params = opened.newest(sys.argv[2])
assert not any(name.partition(".")[0] == "replicax" for name in sys.modules)
leaves = {f"{layer}.{name}": a for layer, each in params.items() for name, a in each.items()}
np.savez(sys.argv[3], step=step, **leaves)
"""
FIRST, LAST = 20, 160


def started(script: str, *arguments: object) -> "subprocess.Popen[str]":
    command = [sys.executable, *(["-c", script] if "\n" in script else [script])]
    environment = {**os.environ, "JAX_NUM_CPU_DEVICES": "4", "WANDB_SILENT": "true"}
    return subprocess.Popen(
        [*command, *map(str, arguments)], env=environment, stdout=subprocess.PIPE, text=True
    )


def done(*command: object) -> str:
    script, *arguments = command
    with started(str(script), *arguments) as process:
        out, _ = process.communicate(timeout=300)
    assert process.returncode == 0
    return out


def opened(run: Path) -> dict[str, np.ndarray]:
    done(OPENED, FOLDER, run, run / "opened.npz")
    with np.load(run / "opened.npz") as arrays:
        return dict(arrays)


@EXHAUSTIVE
def test_a_killed_run_goes_on_and_orbax_alone_opens_what_it_leaves(tmp_path: Path) -> None:
    for package in ("torch", "torchdata", "sklearn", "wandb"):
        pytest.importorskip(package, reason=f"no {package}: `make peers` installs it")
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    done(FOLDER / "train.py", whole)

    with started(str(FOLDER / "train.py"), killed) as process:
        while not (killed / f"checkpoints/{FIRST}").exists():
            assert process.poll() is None
            time.sleep(0.005)
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    reached = json.loads((killed / "records.jsonl").read_text().splitlines()[-1])["step"]
    assert reached < LAST
    begun_from = opened(killed)["step"]
    told = done(FOLDER / "train.py", killed)
    resumed = next(line for line in told.splitlines() if line.startswith("resume"))
    assert f"step {begun_from}" in resumed, resumed

    mine, theirs = opened(killed), opened(whole)
    assert mine["step"] == LAST
    assert mine.keys() == theirs.keys() > {"hidden.kernel", "norm.scale", "out.bias"}
    for name in mine:
        np.testing.assert_array_equal(mine[name], theirs[name], err_msg=name)
