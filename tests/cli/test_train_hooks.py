"""Flags of `replicax train` for hooks: their effect, and their errors."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from support.command_line import RECIPE, Main, done, refusal

import replicax as rx
from replicax.cli.train import EvalOptions, RecordOptions, TrainOptions

LINE = ["train", "linear_regression", "--points", "48", "--batch-size", "16", "--epochs", "3"]
ALL = [
    *("--eval-every", "4", "--eval-at-start", "--eval-rows", "5", "--keep-best", "loss"),
    *("--early-stopping", "loss:9", "--log-to", "csv", "--gradient-norm", "--profile", "3:4"),
    *("--log-every", "2", "--dump-hlo", "hlo"),
]

RATES = """
    @property
    def tokens_per_row(self):
        return 7

    def schedule(self):
        return optax.linear_schedule(0.5, 0.0, 10)

    def optimizer(self):
        return optax.sgd(self.schedule())
"""
INJECTED = """
    def optimizer(self):
        return optax.inject_hyperparams(optax.sgd)(learning_rate=0.25)
"""
ANOTHER = """

class Another(Mine):
    def optimizer(self):
        return optax.sgd(0.1)
"""


def records(folder: Path, run: str, kind: str) -> list[dict[str, Any]]:
    lines = (folder / f"runs/{run}/records.jsonl").read_text().splitlines()
    return [each for each in map(json.loads, lines) if each["kind"] == kind]


def test_each_flag_does_what_it_says_and_is_given_back(main: Main, folder: Path) -> None:
    done(main, *LINE, *ALL, "--run", "a")
    assert [each["step"] for each in records(folder, "a", "eval")] == [0, 4, 8, 9]
    assert all("gradient_norm" in each["metrics"] for each in records(folder, "a", "train"))
    assert json.loads((folder / "runs/a/best.json").read_text())["step"] == 9
    assert (folder / "runs/a/records.csv").exists()
    assert len(list(folder.glob("runs/a/profile/**/*.xplane.pb"))) == 1
    assert {path.name for path in (folder / "hlo").iterdir()} == {"step.mlir", "step.hlo"}
    options = json.loads((folder / "runs/a/config.json").read_text())["options"]
    again = ["train", "linear_regression", "--config", "runs/a/config.json", "--run", "b"]
    done(main, *again, "--profile", "5")
    found = json.loads((folder / "runs/b/config.json").read_text())["options"]
    assert found == {**options, "run": "b", "profile": "5"}
    assert [each["step"] for each in records(folder, "b", "eval")] == [0, 4, 8, 9]


def test_what_is_watched_may_change_in_a_run_that_goes_on(main: Main) -> None:
    assert main(*LINE, "--run", "a")[0] == 0
    out = done(main, *LINE[:-1], "4", *ALL, "--run", "a")
    assert re.search(r"done: 3 steps since .*\b9\b", out)


@pytest.mark.parametrize(
    ("flags", "steps", "epochs"),
    [
        ({}, None, 1),
        ({"eval_every": 4}, 4, None),
        ({"eval_every_epochs": 2}, None, 2),
        ({"eval_every": 4, "eval_every_epochs": 2}, 4, 2),
    ],
)
def test_when_a_run_is_evaluated(
    flags: dict[str, int], steps: int | None, epochs: int | None
) -> None:
    evaluation = EvalOptions(**flags).evaluation({"x": [1.0]})
    assert (evaluation.every_steps, evaluation.every_epochs) == (steps, epochs)


def test_the_hooks_of_flags_in_their_order() -> None:
    assert TrainOptions().hooks() == []
    options = TrainOptions(
        eval=EvalOptions(early_stopping="dev/loss:4", keep_best="accuracy"),
        record=RecordOptions(log_to="wandb, csv"),
    )
    best, stopping, *loggers = options.hooks()
    assert (best.name, stopping.name) == ("KeepBest(accuracy)", "EarlyStopping(dev/loss)")
    assert [type(each) for each in loggers] == [rx.hooks.WandB, rx.hooks.CSV]
    assert vars(stopping)["_patience"] == 4
    (three,) = TrainOptions(eval=EvalOptions(early_stopping="loss")).hooks()
    assert vars(three)["_patience"] == vars(rx.hooks.EarlyStopping())["_patience"]


@pytest.fixture
def unbegun(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is placed, so nothing is compiled."""

    def init(*_: Any, **settings: Any) -> None:
        raise AssertionError("the model was placed on the devices")

    monkeypatch.setattr(rx.DataParallel, "init", init)


@pytest.mark.parametrize(
    ("logger", "package"),
    [("tensorboard", "tensorboard"), ("wandb", "wandb"), ("comet", "comet_ml")],
)
@pytest.mark.usefixtures("unbegun")
def test_a_logger_whose_library_is_missing_is_refused_before_anything_is_compiled(
    logger: str, package: str, main: Main, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    line = refusal(main, *LINE, "--log-to", logger)
    for word in (package, f"[{logger}]"):
        assert word in line


def test_a_recipe_without_evaluation_data_has_no_flags_that_need_it(
    main: Main, folder: Path
) -> None:
    (folder / "my_line.py").write_text(RECIPE + "    def eval_source(self):\n        return None\n")
    assert main("train", "my_line.py:Mine", "--epochs", "1")[0] == 0
    for flag in (["--eval-at-start"], ["--keep-best", "loss"], ["--eval-rows", "9"]):
        line = refusal(main, "train", "my_line.py:Mine", *flag)
        for word in (flag[0], "eval_source"):
            assert word in line


@pytest.mark.parametrize(
    ("spec", "more", "rates"),
    [
        ("Mine", RATES, [0.5, 0.35, 0.15, 0.0]),
        ("Mine", INJECTED, [0.25] * 4),
        ("Another", RATES + ANOTHER, None),
        ("Mine", "", None),
    ],
    ids=["schedule", "injected", "inherited", "unknown"],
)
def test_what_is_recorded_of_each_run(
    spec: str, more: str, rates: list[float] | None, main: Main, folder: Path
) -> None:
    """Records have the learning rate if it is known, and tokens if rows have a fixed number."""
    (folder / "my_rate.py").write_text("import optax\n" + RECIPE + more)
    flags = ["--points", "176", "--steps", "11", "--log-every", "4", "--run", "a"]
    assert main("train", f"my_rate.py:{spec}", *flags)[0] == 0
    train = records(folder, "a", "train")
    assert [each["step"] for each in train] == [1, 4, 8, 11]
    found = [each.get("figures", {}).get("learning_rate") for each in train]
    assert found == ([None] * 4 if rates is None else pytest.approx(rates, abs=1e-6))
    tokens = [each.get("figures", {}).get("tokens_per_second") for each in train[1:]]
    counted = [7 * each["rows_per_second"] if "tokens" in more else None for each in train[1:]]
    assert tokens == counted
