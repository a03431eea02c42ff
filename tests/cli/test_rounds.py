"""Rounds of islands on the command line: the flags, the runs, and what opens them again."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from support.command_line import Main
from support.recipe_runs import MLP, Ended, train

import replicax as rx
from replicax.cli.flags import parse_with_recipe
from replicax.cli.train import TrainOptions
from replicax.core.between.rounds import OuterSGD
from replicax.core.ground.codecs import CODECS
from replicax.core.ground.job import Alone

ON_REPLICAS = ["--devices", "2", "--mode", "shard_map", "--island-axis", "data"]
ROUNDS = ["--every", "3", "--send", "int4", "--outer-rate", "0.5", *ON_REPLICAS]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """A run of two islands, which ends in the middle of a round."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("rounds"))
        return train("rounds", *MLP, *ROUNDS)


def rounds_of(*flags: str, job: Any = None) -> rx.Rounds | None:
    options = parse_with_recipe("train", TrainOptions, ["mlp", *flags]).options
    return options.islands.rounds(None, job or Alone()).get("rounds")


def test_the_flags_are_those_of_islands() -> None:
    flags = ["--every", "30", "--send", "int4", "--fragments", "2", "--delay", "5"]
    assert rounds_of(*flags) == rx.Rounds(30, "int4", fragments=2, delay=5)


@pytest.mark.parametrize(
    ("flags", "rate", "momentum"),
    [
        (["--outer-rate", "0.3"], 0.3, 0.9),
        (["--outer-momentum", "0.5"], 0.5, 0.5),
        (["--outer-momentum", "0.5", "--island-axis", "data"], 0.8, 0.5),
        (["--outer-rate", "0.7", "--send", "sparse"], 0.7, 0.0),
    ],
)
def test_what_one_flag_of_the_outer_step_leaves_to_the_others(
    flags: list[str], rate: float, momentum: float
) -> None:
    rounds = rounds_of("--every", "30", *flags)
    assert isinstance(rounds.outer, OuterSGD)
    assert (rounds.outer.rate, rounds.outer.momentum) == (rate, momentum)


def test_the_number_of_islands_of_the_job_decides_the_rate() -> None:
    job = SimpleNamespace(peers=SimpleNamespace(count=4))
    rounds = rounds_of("--every", "30", "--outer-momentum", "0.9", job=job)
    assert isinstance(rounds.outer, OuterSGD)
    assert rounds.outer.rate == 0.6


def test_a_run_is_opened_with_its_outer_parameters(
    run: Ended, main: Main, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(run.folder.parents[1])
    wanted = jax.device_get(run.result.state.params)
    loaded = rx.load(run.folder)
    assert (loaded.step, loaded.state.islands) == (run.result.step, ())
    jax.tree.map(np.testing.assert_array_equal, loaded.state.params, wanted)
    code, out, _ = main("evaluate", "rounds", "--json")
    found = json.loads(out)
    assert code == 0
    assert found["metrics"]["loss"] == pytest.approx(run.result.metrics["loss"], rel=1e-5)
    assert found["recorded"]["loss"] == run.result.metrics["loss"]
    assert main("export", "rounds", "weights.safetensors")[0] == 0
    tensors = saved_tensors(Path("weights.safetensors"))
    params = {
        jax.tree_util.keystr(path, simple=True, separator="."): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(wanted)
    }
    assert tensors.keys() == params.keys()
    for name, leaf in params.items():
        np.testing.assert_array_equal(tensors[name], leaf)
    code, out, _ = main("runs")
    assert (code, out.splitlines()[1].split()[:3]) == (0, ["rounds", "mlp", "8"])


def saved_tensors(path: Path) -> dict[str, np.ndarray]:
    found: dict[str, np.ndarray] = pytest.importorskip("safetensors.numpy").load_file(path)
    return found


def test_a_loaded_run_trains_on_without_rounds(run: Ended) -> None:
    loaded = rx.load(run.folder)
    recipe = loaded.recipe
    (batch, *_) = loaded.dp.feed(recipe.train_source(), recipe.batch_size)
    state, metrics = loaded.dp.step(loaded.state, batch)
    assert int(state.step) == run.result.step + 1
    assert np.isfinite(float(metrics["loss"]))


def test_a_loaded_run_has_the_whole_state_with_its_own_rounds(run: Ended) -> None:
    state = run.result.state
    mesh = rx.make_mesh(devices=jax.devices()[:2])
    recipe = rx.load(run.folder).recipe
    rounds = rx.Rounds(3, "int4", OuterSGD(2, CODECS["int4"], 0.5), axis="data")
    dp = rx.DataParallel(
        recipe.loss, recipe.optimizer(), mode="shard_map", mesh=mesh, rounds=rounds
    )
    like = dp.abstract_state(recipe.model(jax.random.key(0)))
    loaded = rx.load(run.folder, dp=dp, state=like)
    jax.tree.map(np.testing.assert_array_equal, loaded.state, state)
