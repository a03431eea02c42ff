"""Records -> a picture of the run, drawn while it goes."""

import contextlib
import io
import itertools
import math
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from replicax.errors import MissingDependencyError, require
from replicax.train.hook import Hook, Running
from replicax.train.places import write_whole
from replicax.train.records import Record

FILE = "curves.png"
# Okabe and Ito's colours, told apart with any kind of colour vision.
TRAIN, *EVAL = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9"
COLUMNS = 4
MOST_MARKERS = 20
MOST_POINTS = 1000
LOG_SCALE_FROM = 30.0
"""Largest loss over smallest from which a linear axis would hide the end of a run."""
RATES = 50
"""At most so many rates are drawn, each over as much of the time: records that an evaluation cut
short would make a zigzag."""

Panels = dict[str, dict[str, list[tuple[int, float]]]]
"""Metric -> series (`train`, `eval`, or the name of a set that was evaluated) -> steps, values."""


class Curves(Hook):
    """Draws `curves.png` in the run's folder, in a thread while it trains, and once it is over.

    Args:
        title: of the picture; the folder's name by default.
        seconds: at least so many are between two drawings.
    """

    def __init__(self, title: str | None = None, seconds: float = 60.0) -> None:
        self._title, self._seconds = title, seconds
        self._begun_at = time.monotonic()
        self._thread = ThreadPoolExecutor(1, "replicax-curves")
        self._drawing: Future[None] | None = None

    def start(self, run: Running) -> None:
        """Draw for the first time so many seconds from now."""
        self._begun_at = time.monotonic()

    def record(self, run: Running, record: Record) -> None:
        """Begin to draw, where it is time."""
        if run.folder is None or time.monotonic() - self._begun_at < self._seconds:
            return
        if self._drawing is not None:
            if not self._drawing.done():
                return
            self._drawing.result()  # raises what the thread has raised
        self._begun_at = time.monotonic()
        self._drawing = self._thread.submit(self._draw, list(run.records), run.folder)

    def end(self, run: Running) -> None:
        """Draw the whole run."""
        self._thread.shutdown()
        if run.folder is None or not run.records:
            return
        try:
            draw_curves(run.records, run.folder / FILE, self._title_of(run.folder))
        except MissingDependencyError as error:
            run.say(f"no {FILE}: {error}")

    def _draw(self, records: list[Record], folder: Path) -> None:
        with contextlib.suppress(MissingDependencyError):  # the end says so
            draw_curves(records, folder / FILE, self._title_of(folder))

    def _title_of(self, folder: Path) -> str:
        return self._title or folder.resolve().name


def draw_curves(records: Sequence[Record], path: Path, title: str) -> None:
    """Draw every metric and figure over the steps, one panel each, and rows per second.

    Who looks at `path` meanwhile finds what was there before.

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    figure_module = require("matplotlib.figure", "cli")
    panels = panels_of(records)
    count = len(panels) + 1
    rows = -(-count // COLUMNS)
    columns = -(-count // rows)
    figure = figure_module.Figure(figsize=(4.2 * columns, 3.3 * rows), layout="constrained")
    figure.suptitle(title, parse_math=False)
    axes = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axis, (name, series) in zip(axes, panels.items(), strict=False):
        _draw_panel(axis, name, series)
    if "loss" in panels:
        _use_log_scale(axes[0], panels["loss"])
    _draw_rates(axes[count - 1], records)
    for axis in axes[count:]:
        axis.set_visible(False)
    drawn = io.BytesIO()
    figure.savefig(drawn, format="png", dpi=150)
    write_whole(path, drawn.getvalue())


def panels_of(records: Sequence[Record]) -> Panels:
    """Return what each panel shows: the loss first, then other metrics and figures.

    `dev/loss` of an evaluation is the series `dev` beside the loss of the steps.
    """
    found: Panels = {}
    trained = {name for r in records if r.kind == "train" for name in r.metrics}
    for record in records:
        for panel, series, value in _values(record, trained):
            found.setdefault(panel, {}).setdefault(series, []).append((record.step, value))
    return {name: found[name] for name in sorted(found, key=lambda name: name != "loss")}


def rates_of(records: Sequence[Record]) -> list[tuple[int, float]]:
    """Return steps and rows per second, each over at least a part in `RATES` of the timed seconds.

    Args:
        records: of any kind; those of train records that were timed are looked at.
    """
    timed = [record for record in records if record.kind == "train" and record.seconds > 0]
    least = math.fsum(record.seconds for record in timed) / RATES
    windows: list[tuple[int, int, float]] = []
    for record in timed:
        rows, seconds = record.rows, record.seconds
        if windows and windows[-1][2] < least:
            _, more_rows, more_seconds = windows.pop()
            rows, seconds = rows + more_rows, seconds + more_seconds
        windows.append((record.step, rows, seconds))
    if len(windows) > 1 and windows[-1][2] < least:  # the rest
        _, rows, seconds = windows.pop(-2)
        step, more_rows, more_seconds = windows.pop()
        windows.append((step, rows + more_rows, seconds + more_seconds))
    return [(step, rows / seconds) for step, rows, seconds in windows]


def _values(record: Record, trained: set[str]) -> Iterator[tuple[str, str, float]]:
    """Panel, series and value of each metric and figure of a record."""
    if record.kind == "train":
        for name, value in {**record.metrics, **(record.figures or {})}.items():
            yield name, "train", value
    if record.kind == "eval":
        for name, value in record.metrics.items():
            group, slash, metric = name.rpartition("/")
            if slash and name not in trained:
                yield metric, group, value
            else:
                yield name, "eval", value


def _draw_panel(axis: Any, name: str, series: dict[str, list[tuple[int, float]]]) -> None:
    colours = itertools.cycle(EVAL)
    for label, points in series.items():
        colour = TRAIN if label == "train" else next(colours)
        _plot(axis, label, points, colour)
    axis.set_ylabel(name, parse_math=False)
    if list(series) != ["train"]:
        axis.legend(frameon=False)
    _dress(axis)


def _draw_rates(axis: Any, records: Sequence[Record]) -> None:
    rates = rates_of(records)
    _plot(axis, "train", rates, TRAIN)
    axis.set_ylabel("rows per second")
    fastest = max((rate for _, rate in rates), default=1.0)
    axis.set_ylim(0, 1.1 * fastest)
    if fastest > 10:
        axis.yaxis.set_major_formatter("{x:,.0f}")
    _dress(axis)


def _plot(axis: Any, label: str, points: list[tuple[int, float]], colour: str) -> None:
    if not points:
        return
    # One point has no line, and many markers hide theirs.
    few = len(points) == 1 or (label != "train" and len(points) <= MOST_MARKERS)
    steps, values = zip(*_thinned(points), strict=True)
    axis.plot(
        steps,
        values,
        color=colour,
        label=label,
        marker="o" if few else None,
        linewidth=1.2,
        markersize=4,
    )


def _thinned(points: list[tuple[int, float]]) -> list[tuple[int, float]]:
    """Return `points`, or means of neighbours where there are more than can be seen."""
    size = -(-len(points) // MOST_POINTS)
    if size <= 1:
        return points
    groups = [points[at : at + size] for at in range(0, len(points), size)]
    return [(each[-1][0], _mean([value for _, value in each])) for each in groups]


def _mean(values: list[float]) -> float:
    finite = [value for value in values if math.isfinite(value)]
    return math.fsum(finite) / len(finite) if finite else math.nan


def _use_log_scale(axis: Any, series: dict[str, list[tuple[int, float]]]) -> None:
    losses = [loss for points in series.values() for _, loss in points if math.isfinite(loss)]
    if losses and min(losses) > 0 and max(losses) / min(losses) > LOG_SCALE_FROM:
        axis.set_yscale("log")


def _dress(axis: Any) -> None:
    axis.set_xlabel("step")
    axis.xaxis.get_major_locator().set_params(integer=True)
    axis.xaxis.set_major_formatter(_short if axis.get_xlim()[1] >= 100_000 else "{x:,.0f}")
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(alpha=0.25)


def _short(step: float, _: int) -> str:
    """`0`, `250k` or `1.5M`: in a small panel, longer ones would run into each other."""
    if step >= 1e6:
        return f"{step / 1e6:g}M"
    return f"{step / 1e3:g}k" if step >= 1e3 else f"{step:g}"
