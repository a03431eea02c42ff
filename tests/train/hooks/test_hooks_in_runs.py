"""Built-in hooks in runs: what stops, what stays, and what the next start knows."""

import csv
import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import replicax as rx
from replicax.errors import ConfigError

X = np.random.default_rng(0).normal(size=32).astype(np.float32)
SOURCE = {"x": X, "y": 2 * X}
EPOCH = 4


class Crash(rx.Hook):
    """Ends a run with an error, after a step."""

    def __init__(self, at: int) -> None:
        self._at = at

    def dispatched(self, run: Any, step: Any) -> None:
        if step.place.step == self._at:
            raise ConfigError("as a kill would")


class Scores(rx.Hook):
    """Replaces the results of evaluations by the values of `score`, in order."""

    def __init__(self, *values: float) -> None:
        self._values = values

    def record(self, run: Any, record: Any) -> None:
        if record.kind == "eval":
            number = sum(each.kind == "eval" for each in run.records)
            record.metrics["score"] = self._values[number - 1]


def loss(model: Any, batch: Any, key: Any) -> Any:
    values = (model["w"] * batch["x"] - batch["y"]) ** 2
    return values, {"score": values}  # a value that `Scores` replaces


@pytest.fixture(scope="module")
def dp() -> rx.DataParallel:
    return rx.DataParallel(loss, optax.sgd(0.01))


def fit(dp: rx.DataParallel, *hooks: rx.Hook, **settings: Any) -> rx.types.Fit:
    settings = {"epochs": 6, "eval_source": SOURCE, "progress": False, "log_every": 1, **settings}
    state = dp.init({"w": jnp.float32(0)})
    return rx.fit(dp, state, SOURCE, batch_size=8, hooks=hooks, **settings)


def checkpoints(run: Path) -> set[int]:
    return {int(path.name) for path in (run / "checkpoints").glob("[0-9]*")}


def test_a_run_that_was_stopped_stops_at_once_when_it_is_started_again(
    dp: rx.DataParallel, tmp_path: Path
) -> None:
    def hooks() -> list[rx.Hook]:
        return [Scores(3.0, 2.0, 2.0), rx.hooks.EarlyStopping("score", 1, mode="max")]

    assert fit(dp, *hooks(), run_dir=tmp_path).step == 2 * EPOCH
    again = fit(dp, *hooks(), run_dir=tmp_path)
    assert (again.step, again.steps) == (2 * EPOCH, 0)
    more = fit(
        dp, Scores(3.0, 2.0, 1.0), rx.hooks.EarlyStopping("score", 2, mode="max"), run_dir=tmp_path
    )
    assert more.step == 3 * EPOCH


def test_what_the_hooks_know_survives_a_crash(dp: rx.DataParallel, tmp_path: Path) -> None:
    """The run equals one without a crash: its stop, its best checkpoint, and its table."""
    scores = Scores(2.0, 3.0, 1.0, 1.0, 1.0, 9.0)

    def hooks() -> list[rx.Hook]:
        best = rx.hooks.KeepBest("score", mode="max")
        return [scores, rx.hooks.EarlyStopping("score", 3, mode="max"), best, rx.hooks.CSV()]

    ends = []
    for name, crash in (("whole", None), ("crashed", 3 * EPOCH + 2)):
        run, saving = tmp_path / name, rx.Saving(every=3, keep=1)
        if crash is not None:
            with pytest.raises(ConfigError):
                fit(dp, *hooks(), Crash(crash), run_dir=run, saving=saving)
        result = fit(dp, *hooks(), run_dir=run, saving=saving)
        best = json.loads((run / "best.json").read_text())
        del best["checksum"], best["evaluation"]
        with (run / "records.csv").open(newline="") as file:
            table = [(row["kind"], row["step"], row["loss"]) for row in csv.DictReader(file)]
        assert table == [(r.kind, str(r.step), str(r.metrics["loss"])) for r in result.records]
        assert checkpoints(run) == {best["step"], result.step}
        ends.append((result.step, best, table))
    assert ends[0] == ends[1]
    assert ends[0][:2] == (5 * EPOCH, {"metric": "score", "value": 3.0, "step": 2 * EPOCH})


@pytest.mark.promise("outside.late-refusals")
@pytest.mark.parametrize(
    ("hook", "settings", "word"),
    [
        (rx.hooks.KeepBest("scor"), {}, "'score'"),
        (
            rx.hooks.KeepBest("score"),
            {"eval_source": rx.Evaluation(sets={"dev": SOURCE})},
            "dev/score",
        ),
        (rx.hooks.KeepBest("score", mode="max"), {"saving": rx.Saving(minutes=None)}, "Saving"),
        (rx.hooks.KeepBest("score", mode="max"), {"run_dir": None}, "run_dir"),
        (rx.hooks.EarlyStopping("score"), {"eval_source": None}, "eval_source"),
        (rx.hooks.EarlyStopping("score"), {}, "mode="),
    ],
)
def test_what_a_hook_cannot_do_is_refused_before_the_run_has_a_folder(
    hook: rx.Hook, settings: dict[str, Any], word: str, dp: rx.DataParallel, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=word):
        fit(dp, hook, **{"run_dir": tmp_path / "run", **settings})
    assert not (tmp_path / "run").exists()


def test_a_loader_is_not_read_to_know_its_metrics(dp: rx.DataParallel, tmp_path: Path) -> None:
    held_out = (batch for batch in [{"x": X[:8], "y": X[:8]}])  # can be read once
    settings = {"epochs": 1, "run_dir": tmp_path, "eval_source": held_out}
    assert fit(dp, rx.hooks.KeepBest("score", mode="max"), **settings).step == EPOCH


class Speed(rx.Hook):
    """Adds a figure, of whatever type."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def figures(self, run: Any, record: Any) -> dict[str, Any]:
        return {"speed": self.value}


@pytest.mark.parametrize(
    ("value", "written", "failed"),
    [
        (np.float32(2), 2.0, ()),
        (jnp.float32(2), 2.0, ()),
        (np.int64(2), 2.0, ()),
        ([1, 2], None, ("Speed",)),
        ("fast", None, ("Speed",)),
    ],
)
def test_a_figure_of_any_type_costs_no_record(
    value: Any,
    written: float | None,
    failed: tuple[str, ...],
    dp: rx.DataParallel,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    result = fit(dp, Speed(value), run_dir=tmp_path, epochs=1, progress=False)
    lines = (tmp_path / "records.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [each.step for each in result.records]
    figures = [json.loads(line).get("figures") for line in lines if '"train"' in line]
    assert figures == [None if written is None else {"speed": written}] * len(figures)
    assert result.failed_hooks == failed
    assert capsys.readouterr().err.count("ALARM") == len(failed)


def test_a_profile_is_what_tensorboard_opens(dp: rx.DataParallel, tmp_path: Path) -> None:
    result = fit(dp, rx.hooks.Profile(2, 3), run_dir=tmp_path, epochs=1)
    assert result.failed_hooks == ()
    assert len(list(tmp_path.glob("profile/plugins/profile/*/*.xplane.pb"))) == 1


def test_two_hooks_of_one_kind_are_told_apart_by_their_metrics(dp: rx.DataParallel) -> None:
    scores = Scores(1.0, 2.0, 3.0, 3.0, 3.0, 3.0)
    hooks = rx.hooks.EarlyStopping("score", 2, mode="max"), rx.hooks.EarlyStopping("loss", 5)
    assert fit(dp, scores, *hooks).step == 5 * EPOCH
    with pytest.raises(ConfigError, match="name"):
        fit(dp, rx.hooks.CSV("a.csv"), rx.hooks.CSV("b.csv"))


@pytest.mark.parametrize("file", ["/dev/null", "../best.json"])
def test_the_file_of_the_best_is_a_name(file: str) -> None:
    with pytest.raises(ConfigError, match="file="):
        rx.hooks.KeepBest("loss", file=file)
