"""`examples/complete`: scripts as users write them, killed, resumed, and what they leave opened."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file
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


@pytest.fixture
def tuning() -> Any:
    """The module of `finetune_lora.py`."""
    spec = importlib.util.spec_from_file_location("finetune_lora", FOLDER / "finetune_lora.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_streamed_rows_have_every_byte_of_their_pages_once(tuning: Any) -> None:
    names = ["assert", "break", "pass", "del", "with"]
    batches = list(tuning.Pages(names))
    assert {len(batch["length"]) for batch in batches[:-1]} == {tuning.BATCH}
    # The first token of some pages is no target: they begin in rows of their own.
    targets = sum(int(batch["length"].sum()) for batch in batches)
    assert targets == sum(len(tuning.topics[name].encode()) + 1 for name in names) - 2
    base = tuning.transformer.init(tuning.SHAPE, jax.random.key(0))
    model = {"base": base, "lora": tuning.adapters(base, jax.random.key(1))}
    jax.tree.map(np.testing.assert_array_equal, tuning.merged(model), base)


@EXHAUSTIVE
def test_lora_weights_and_their_base_are_the_network_that_was_tuned(
    tuning: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "BASE_STEPS", 20)
    monkeypatch.setattr(tuning, "STEPS", 20)
    tuning.main(tmp_path)
    lines = (tmp_path / "run/records.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    losses = [record["metrics"]["loss"] for record in records if record["kind"] == "eval"]
    assert losses[-1] < losses[0]
    base, lora, tuned = (
        load_file(tmp_path / f"{name}.safetensors") for name in ("base", "lora", "tuned")
    )
    assert sum(array.size for array in lora.values()) == 8_192
    changed = {name for name in base if (base[name] != tuned[name]).any()}
    assert changed == {name for name in base if ".c_" in name and name.endswith("weight")}
    for layer in range(tuning.LAYERS):
        added = lora["mlp.c_fc.a"][layer] @ lora["mlp.c_fc.b"][layer]
        name = f"h.{layer}.mlp.c_fc.weight"
        np.testing.assert_allclose(tuned[name], base[name] + added, rtol=1e-5, atol=1e-6)
