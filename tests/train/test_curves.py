"""Curves: a real picture of any history, drawn during a run and at its end."""

import math
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib.image
import numpy as np
import pytest
from support.clock import Clock
from support.tiers import only

from replicax.errors import MissingDependencyError
from replicax.train import curves as module
from replicax.train.curves import Curves, draw_curves, panels_of, rates_of
from replicax.train.records import Record

NO_FORMULA = "costs $5^$, a_b^c, 50 % {x}"


def train(step: int, **metrics: float) -> Record:
    return Record("train", step, 0, metrics, 64, 0.0 if step == 1 else 0.1, 0.0)


def score(step: int, **metrics: float) -> Record:
    return Record("eval", step, 0, metrics, 64, 0.1)


def pixels_of(records: Sequence[Record], path: Path) -> Any:
    """Draw records; return rows of pixels with colours from 0 to 1 (white)."""
    draw_curves(records, path)
    return matplotlib.image.imread(path, format="png")[..., :3]


USUAL = [train(step, loss=1 / step, accuracy=step / 9) for step in range(1, 9)]
HISTORIES: dict[str, tuple[list[Record], int, int]] = {
    "usual": ([*USUAL, score(8, loss=0.2, accuracy=0.9)], 1, 3),
    "one step": ([train(1, loss=1.0)], 1, 2),
    "nan": ([train(1, loss=1.0), train(2, loss=math.nan)], 1, 2),
    "eval only": ([score(1, loss=1.0)], 1, 2),
    "metric in eval only": ([train(1, loss=1.0), score(1, loss=1.0, top5=0.5)], 1, 3),
    "none": ([], 1, 1),
    "five panels": ([train(1, loss=1.0, a=1.0, b=1.0, c=1.0)], 2, 3),
    "many metrics": ([train(1, loss=1.0, **{f"metric {n}": 1.0 for n in range(16)})], 5, 4),
    "a metric's name is text": ([train(1, **{NO_FORMULA: 1.0})], 1, 2),
}


@pytest.mark.parametrize("name", only(["usual", "none", "a metric's name is text"], HISTORIES))
def test_any_history_is_drawn_below_a_title_that_is_text(name: str, tmp_path: Path) -> None:
    records, rows, columns = HISTORIES[name]
    (tmp_path / NO_FORMULA).mkdir()
    pixels = pixels_of(records, tmp_path / NO_FORMULA / "curves.png")
    assert pixels.shape == (rows * 495, columns * 630, 3)
    assert np.count_nonzero(pixels != 1) > 1000


def test_a_single_record_can_be_seen(tmp_path: Path) -> None:
    pixels = pixels_of([train(1, loss=1.0)], tmp_path / "one.png")
    panel = pixels[150:400, 100:420]  # inside the loss panel's axes, clear of its legend
    blue = np.array([0x00, 0x72, 0xB2]) / 255
    assert np.any(np.all(np.abs(panel - blue) < 0.1, axis=-1))


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


def test_rates_are_of_neighbours_where_there_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = [(10, 0.0), (10, 1.0), (2, 0.5), (20, 1.6), (930, 93.0), (30, 3.4)]
    timed = [Record("train", step, 0, {}, *each) for step, each in enumerate(measured, 1)]
    assert rates_of(timed[:1]) == []
    assert rates_of(timed) == [(2, 10.0), (3, 4.0), (4, 12.5), (5, 10.0), (6, 30 / 3.4)]
    monkeypatch.setattr(module, "RATES", 2)
    assert rates_of([*timed, score(8, loss=1.0)]) == [(4, 32 / 3.1), (6, 960 / 96.4)]


def test_a_long_run_is_drawn_as_means_and_its_steps_are_written_short() -> None:
    given = [4.0, 8.0, 1.0, math.nan, math.nan, math.nan, 5.0]
    groups = module._groups(given, 3)
    assert [len(each) for each in groups] == [3, 3, 1]
    np.testing.assert_array_equal([module._mean(each) for each in groups], [13 / 3, math.nan, 5.0])
    assert module._groups(given, 7) == [[each] for each in given]
    steps = map(module._short(), (0, 500, 250_000, 1_500_000))
    assert list(steps) == ["0", "500", "250k", "1.5M"]


class Going:
    """Stands in for a run, and for `draw_curves`, which waits until it may go."""

    def __init__(self, folder: Path) -> None:
        self.folder: Path | None = folder
        self.clock, self.hook = Clock(), Curves(seconds=60)
        self.records, self.said = list[Record](), list[str]()
        self.say = self.said.append
        self.drawn = list[tuple[int, Path, bool]]()
        self.begun, self.may_go = threading.Semaphore(0), threading.Event()
        self.may_go.set()

    def add(self, seconds: float) -> None:
        self.clock.now += seconds
        self.records.append(train(len(self.records) + 1, loss=1.0))
        self.hook.record(self, self.records[-1])

    def draw(self, records: Sequence[Record], path: Path) -> None:
        beside = threading.current_thread() is not threading.main_thread()
        self.begun.release()
        assert self.may_go.wait(10)
        self.drawn.append((len(records), path, beside))


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    run: Any = Going(tmp_path)
    monkeypatch.setattr(module, "time", run.clock)
    monkeypatch.setattr(module, "draw_curves", run.draw)
    run.hook.start(run)
    return run


def test_a_run_is_drawn_every_so_often_beside_it_and_its_end_waits_for_that(run: Any) -> None:
    for count in range(1, 19):
        run.add(seconds=10)
        if count % 6 == 0:
            assert run.begun.acquire(timeout=10)
            run.hook._drawing.result(10)
    run.may_go.clear()
    for _ in range(5):  # does not wait
        run.add(seconds=61)
    assert run.begun.acquire(timeout=10)
    assert not run.begun.acquire(timeout=0.1)  # one at a time
    assert len(run.drawn) == 3
    threading.Timer(0.1, run.may_go.set).start()
    run.hook.end(run)
    times = [(6, True), (12, True), (18, True), (19, True), (23, False)]
    assert run.drawn == [(count, run.folder / "curves.png", beside) for count, beside in times]


def test_a_drawing_that_fails_leaves_the_last_one_and_is_raised_in_the_run(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def half(figure: Any, file: Any, **settings: Any) -> None:
        file.write(before[:100])
        raise OSError(28, "No space left on device")

    path = run.folder / "curves.png"
    draw_curves([train(1, loss=1.0)], path)
    before = path.read_bytes()
    monkeypatch.setattr(module, "draw_curves", draw_curves)
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", half)
    run.add(seconds=61)
    assert run.hook._drawing.exception(10).errno == 28
    with pytest.raises(OSError, match="No space"):
        run.add(seconds=61)
    run.hook._thread.shutdown()
    assert path.read_bytes() == before


@pytest.mark.parametrize("has_folder", [False, True])
def test_without_a_folder_or_a_record_nothing_is_drawn(run: Any, has_folder: bool) -> None:
    if not has_folder:
        run.folder = None
        run.add(seconds=61)
    run.hook.end(run)
    assert run.drawn == []


def test_without_matplotlib_the_extra_is_named_and_once_at_the_end_of_a_run(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "draw_curves", draw_curves)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingDependencyError, match=r"matplotlib.*replicax\[cli\]"):
        draw_curves([], tmp_path / "curves.png")
    for _ in range(4):
        run.add(seconds=61)
    run.hook.end(run)
    (said,) = run.said
    assert said.startswith("no curves.png: matplotlib")
    assert list(tmp_path.iterdir()) == []
