"""Curves: a real picture of any history, drawn beside a run and after its end."""

import itertools
import math
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib.image
import numpy as np
import pytest
from support.clock import Clock
from support.tiers import only

from replicax.errors import MissingDependencyError
from replicax.train.files.records import CONFIG, Record, write_json
from replicax.train.hooks import curves, drawing
from replicax.train.hooks.curves import Curves
from replicax.train.hooks.drawing import draw_curves, panels_of, rates_of

NO_FORMULA = "costs $5^$, a_b^c, 50 % {x}"


def train(step: int, **metrics: float) -> Record:
    return Record("train", step, 0, metrics, 64, 0.0 if step == 1 else 0.1, 0.0)


def score(step: int, **metrics: float) -> Record:
    return Record("eval", step, 0, metrics, 64, 0.1)


def pixels_of(records: Sequence[Record], path: Path) -> Any:
    """Draw records; return rows of pixels with colours from 0 to 1 (white), on white."""
    draw_curves(records, path)
    pixels = matplotlib.image.imread(path, format="png")
    assert pixels[0, 0, 3] == 0, "the background is transparent"
    return pixels[..., :3] * pixels[..., 3:] + 1 - pixels[..., 3:]


USUAL = [train(step, loss=1 / step, accuracy=step / 9) for step in range(1, 9)]
HISTORIES: dict[str, tuple[list[Record], int, int]] = {
    "usual": ([*USUAL, score(8, loss=0.2, accuracy=0.9)], 1, 3),
    "one step": ([train(1, loss=1.0)], 1, 2),
    "nan": ([train(1, loss=1.0), train(2, loss=math.nan)], 1, 2),
    "eval only": ([score(1, loss=1.0)], 1, 2),
    "metric in eval only": ([train(1, loss=1.0), score(1, loss=1.0, top5=0.5)], 1, 3),
    "none": ([], 1, 1),
    "five panels": ([train(1, loss=1.0, a=1.0, b=1.0, c=1.0)], 2, 3),
    "many metrics": ([train(1, loss=1.0, **{f"metric {n}": 1.0 for n in range(16)})], 6, 3),
    "a metric's name is text": ([train(1, **{NO_FORMULA: 1.0})], 1, 2),
}


@pytest.mark.parametrize("name", only(["usual", "none", "a metric's name is text"], HISTORIES))
def test_any_history_is_drawn_below_a_title_that_is_text(name: str, tmp_path: Path) -> None:
    records, rows, columns = HISTORIES[name]
    (tmp_path / NO_FORMULA).mkdir()
    pixels = pixels_of(records, tmp_path / NO_FORMULA / "curves.png")
    assert pixels.shape == (rows * 360 + 45, columns * 435, 3)
    assert np.count_nonzero(pixels != 1) > 1000


def test_a_panel_has_each_series_of_its_metric() -> None:
    records = [
        Record("train", 1, 0, {"accuracy": 0.1, "loss": 9.0, "head/loss": 4.0}, 64, 0.0),
        Record("train", 2, 0, {"loss": 8.0}, 64, 1.0, figures={"learning_rate": 0.5}),
        score(2, **{"dev/loss": 7.0, "test/loss": 6.0, "head/loss": 5.0}),
        Record("skip", 3, 0, {"loss": math.nan}, 64, 0.0),
        score(4, loss=3.0),
    ]
    panels = panels_of(records)
    sets = {"dev": [(2, 7.0)], "test": [(2, 6.0)], "eval": [(4, 3.0)]}
    assert panels == {
        "loss": {"train": [(1, 9.0), (2, 8.0)], **sets},
        "accuracy": {"train": [(1, 0.1)]},
        "head/loss": {"train": [(1, 4.0)], "eval": [(2, 5.0)]},  # a metric with that name
        "learning_rate": {"train": [(2, 0.5)]},
    }
    assert next(iter(panels)) == "loss"


def test_rates_are_of_equal_parts_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = [(10, 0.0), (10, 1.0), (2, 0.5), (20, 1.5), (5, 1.0), (30, 1.0), (1, 0.25)]
    timed = [Record("train", step, 0, {}, *each) for step, each in enumerate(measured, 1)]
    assert rates_of(timed[:1]) == []
    singles = [(2, 10.0), (4, 11.0), (5, 5.0), (7, 31 / 1.25)]
    assert rates_of(timed) == singles  # 5.25 s in 8 parts: the end is too short for its own
    monkeypatch.setattr(drawing, "FEWEST_RATES", 2)
    assert rates_of([*timed, score(8, loss=1.0)]) == [(4, 32 / 3), (7, 36 / 2.25)]


def test_the_title_says_what_ran_where() -> None:
    config = {
        "parallel": {"mesh": {"data": 4, "model": 2}, "device_kind": "cpu"},
        "start": {"command": ["/home/me/train.py", "--fast"]},
    }
    assert drawing.title_of(config, "a-1") == "train.py on 8 cpu devices · a-1"
    assert drawing.title_of(config | {"recipe": "mlp"}, "a-1") == "mlp on 8 cpu devices · a-1"


def test_a_long_run_is_drawn_as_means_and_its_steps_are_written_short() -> None:
    given = [4.0, 8.0, 1.0, math.nan, math.nan, math.nan, 5.0]
    groups = drawing._groups(given, 3)
    assert [len(each) for each in groups] == [3, 3, 1]
    np.testing.assert_array_equal([drawing._mean(each) for each in groups], [13 / 3, math.nan, 5.0])
    assert drawing._groups(given, 7) == [[each] for each in given]
    numbers = map(drawing._short(), (0, 3e-5, 0.3, 1500, 250_000, 1_500_000), itertools.repeat(0))
    assert list(numbers) == ["0", "3e-05", "0.3", "1500", "250k", "1.5M"]


class Going:
    """Stands in for a run, and for what starts a drawing and says whether it is done."""

    def __init__(self, folder: Path) -> None:
        self.folder: Path | None = folder
        self.clock, self.hook = Clock(), Curves(seconds=60)
        self.records, self.said = list[Record](), list[str]()
        self.say = self.said.append
        self.started = list[tuple[int, Path, bool]]()
        self.code: int | None = 0

    def add(self, seconds: float) -> None:
        self.clock.now += seconds
        self.records.append(train(len(self.records) + 1, loss=1.0))
        self.hook.record(self, self.records[-1])

    def start(self, folder: Path, *, last: bool = False) -> "Going":
        self.started.append((len(self.records), folder, last))
        return self

    def poll(self) -> int | None:
        return self.code


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    run: Any = Going(tmp_path)
    monkeypatch.setattr(curves, "time", run.clock)
    monkeypatch.setattr(curves, "start_drawing", run.start)
    run.hook.start(run)
    return run


@pytest.mark.parametrize(("code", "more"), [(0, [21, 22]), (None, []), (1, [])])
def test_one_process_at_a_time_draws_every_so_often_until_it_fails_and_at_the_end(
    run: Any, code: int | None, more: list[int]
) -> None:
    for _ in range(20):
        run.add(seconds=10)
    run.code = code
    for _ in range(2):
        run.add(seconds=61)
    run.hook.end(run)
    during = [(count, run.folder, False) for count in (6, 12, 18, *more)]
    assert run.started == [*during, (22, run.folder, True)]
    assert run.said == []


def test_without_matplotlib_the_extra_is_named_and_once_at_the_end_of_a_run(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingDependencyError, match=r"matplotlib.*\[cli\]"):
        draw_curves([], tmp_path / "curves.png")
    for _ in range(4):
        run.add(seconds=61)
    run.hook.end(run)
    (said,) = run.said
    assert said.startswith("no curves.png: matplotlib")
    assert run.started == []
    assert list(tmp_path.iterdir()) == []


def test_a_drawing_that_fails_leaves_the_last_one_and_says_so_in_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def half(figure: Any, file: Any, **settings: Any) -> None:
        file.write(before[:100])
        raise OSError(28, os.strerror(28))

    path = tmp_path / "curves.png"
    (tmp_path / "records.jsonl").write_text(train(1, loss=1.0).to_json() + "\n")
    config = {"parallel": {"mesh": {"data": 1}, "device_kind": "cpu"}, "start": {"command": ["a"]}}
    write_json(tmp_path / CONFIG, config)
    assert drawing.draw_run(tmp_path) == 0
    before = path.read_bytes()
    assert before.endswith(b"IEND\xaeB`\x82")
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", half)
    assert drawing.draw_run(tmp_path) == 1
    assert path.read_bytes() == before
    (line,) = capsys.readouterr().err.splitlines()
    assert os.strerror(28) in line
    assert str(path) in line


PROGRAM = """
import os, sys, time, replicax as rx, numpy as np, optax
dp = rx.DataParallel(lambda w, batch, key: (batch["x"] @ w) ** 2, optax.sgd(0.1))
state = dp.init(np.ones(2, np.float32))
source = {"x": np.ones((8, 2), np.float32)}
rx.fit(dp, state, source, batch_size=4, epochs=2, run_dir="run", progress=False)
print("matplotlib" in sys.modules, os.path.exists("run/curves.png"))
"""


def test_a_program_never_imports_matplotlib_and_its_exit_waits_for_the_picture(
    tmp_path: Path,
) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", PROGRAM],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        check=True,
    )
    assert (done.stdout, done.stderr) == ("False False\n", "")
    picture = tmp_path / "run" / "curves.png"
    assert picture.exists()
    assert matplotlib.image.imread(picture, format="png").shape == (405, 870, 4)
