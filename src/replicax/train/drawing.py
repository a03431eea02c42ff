"""Plot the records of a run: `python -m replicax.train.drawing RUN` writes its `curves.png`.

A run starts it beside itself; see `replicax.train.curves`.
"""

import contextlib
import io
import itertools
import math
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from replicax.errors import require
from replicax.train.places import is_remote, place, write_whole
from replicax.train.records import Record, read_records
from replicax.wording import first_line

CURVES = "curves.png"
# Okabe and Ito's colors, distinguishable with any kind of color vision.
TRAIN, *EVAL = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9"
COLUMNS = 4
MOST_MARKERS = 20
MOST_POINTS = 1000
LOG_SCALE_FROM = 30.0
"""Ratio of largest to smallest loss above which a linear axis would hide the end of a run."""
RATES = 50
"""Maximum number of points; the rates of single records would make a zigzag."""
Panels = dict[str, dict[str, list[tuple[int, float]]]]
"""Metric -> series (`train`, `eval`, or the name of an evaluation set) -> steps, values."""


def draw_curves(records: Sequence[Record], path: Path) -> None:
    """Draw every metric and figure over the steps, one panel each, and rows per second.

    The title is the folder's name. The previous file stays at `path` until the new one is complete.
    """
    figure_module = require("matplotlib.figure", "cli")
    panels = [*panels_of(records).items(), ("rows per second", {"train": rates_of(records)})]
    count = len(panels)
    rows = -(-count // COLUMNS)
    columns = -(-count // rows)
    figure = figure_module.Figure(figsize=(4.2 * columns, 3.3 * rows), layout="constrained")
    figure.suptitle(path.parent.resolve().name, parse_math=False)
    axes = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axis, (name, series) in zip(axes, panels, strict=False):
        _draw_panel(axis, name, series)
    if panels[0][0] == "loss":
        losses = [y for points in panels[0][1].values() for _, y in points if math.isfinite(y)]
        if losses and min(losses) > 0 and max(losses) / min(losses) > LOG_SCALE_FROM:
            axes[0].set_yscale("log")
    axes[count - 1].set_ylim(bottom=0)
    axes[count - 1].yaxis.set_major_formatter(_short())
    for axis in axes[count:]:
        axis.set_visible(False)
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=150)
    write_whole(path, picture.getvalue())


def panels_of(records: Sequence[Record]) -> Panels:
    """Return the series of each panel: the loss first, then other metrics and figures.

    The evaluation metric `dev/loss` becomes the series `dev` next to the training loss.
    """
    found: Panels = {}
    trained = {name for r in records if r.kind == "train" for name in r.metrics}
    for record in records:
        figures = record.figures or {} if record.kind == "train" else {}
        for name, value in {**record.metrics, **figures}.items():
            panel, series = name, record.kind
            group, slash, metric = name.rpartition("/")
            if series == "eval" and slash and name not in trained:
                panel, series = metric, group
            if record.kind in ("train", "eval"):
                found.setdefault(panel, {}).setdefault(series, []).append((record.step, value))
    return {name: found[name] for name in sorted(found, key=lambda name: name != "loss")}


def rates_of(records: Sequence[Record]) -> list[tuple[int, float]]:
    """Return steps and rows per second of the timed train records, averaged over groups."""
    timed = [record for record in records if record.kind == "train" and record.seconds > 0]
    return [
        (each[-1].step, sum(r.rows for r in each) / math.fsum(r.seconds for r in each))
        for each in _groups(timed, RATES)
    ]


def thinned(points: Sequence[tuple[int, float]], most: int) -> list[tuple[int, float]]:
    """Return at most `most` points: the mean of each group, at its last step."""
    return [(each[-1][0], _mean([value for _, value in each])) for each in _groups(points, most)]


def _draw_panel(axis: Any, name: str, series: dict[str, list[tuple[int, float]]]) -> None:
    colours = itertools.cycle(EVAL)
    for label, points in series.items():
        colour = TRAIN if label == "train" else next(colours)
        if not points:
            continue
        # A single point has no line, and many markers would hide the line.
        few = len(points) == 1 or (label != "train" and len(points) <= MOST_MARKERS)
        axis.plot(
            *zip(*thinned(points, MOST_POINTS), strict=True),
            color=colour,
            label=label,
            marker="o" if few else None,
            linewidth=1.2,
            markersize=4,
        )
    axis.set_ylabel(name, parse_math=False)
    if list(series) != ["train"]:
        axis.legend(frameon=False)
    axis.set_xlabel("step")
    axis.xaxis.get_major_locator().set_params(integer=True)
    axis.xaxis.set_major_formatter(_short())
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(alpha=0.25)


def _groups(items: Sequence[Any], most: int) -> list[Sequence[Any]]:
    size = max(-(-len(items) // most), 1)
    return [items[at : at + size] for at in range(0, len(items), size)]


def _mean(values: list[float]) -> float:
    return fmean([value for value in values if math.isfinite(value)] or [math.nan])


def _short() -> Any:
    """Return a formatter for `0`, `250k` or `1.5M`; longer labels collide in a small panel."""
    return require("matplotlib.ticker", "cli").EngFormatter(sep="")


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Wait for other drawings of `folder`, so that the last has the newest records."""
    if is_remote(folder) or os.name == "nt":
        yield
        return
    import fcntl

    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # NFS locks no folders
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def draw_run(folder: Path) -> int:
    """Draw the run in `folder`; return the exit code."""
    try:
        with _alone(folder):
            draw_curves(read_records(folder, sys.maxsize).records, folder / CURVES)
    except Exception as error:  # the run that started this may be over
        if not folder.exists():  # removed since
            return 0
        print(f"replicax: no {folder / CURVES}: {first_line(error)}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(draw_run(place(sys.argv[1])))
