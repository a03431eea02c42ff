"""Plot the records of a run: `python -m replicax.train.hooks.drawing RUN` writes its `curves.png`.

A run starts it beside itself; see `replicax.train.hooks.curves`.
"""

import contextlib
import io
import itertools
import math
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from replicax.errors import require
from replicax.text.plot_style import PALETTE, picture
from replicax.text.wording import counted, first_line
from replicax.train.files.places import is_remote, place, write_whole
from replicax.train.files.records import CONFIG, Record, read_records
from replicax.train.folder.changes import read_config

CURVES = "curves.png"
TRAIN, *EVAL = PALETTE
COLUMNS = 3
"""Panels side by side: text of a picture as wide as a page can be read."""
PANEL_INCHES = (2.9, 2.4)
MOST_MARKERS = 20
MOST_POINTS = 1000
LOG_SCALE_FROM = 30.0
"""Ratio of largest to smallest loss above which a linear axis would hide the end of a run."""
FEWEST_RATES, MOST_RATES, RECORDS_OF_RATE = 8, 50, 4
"""Points of a rate, and records of one; the rates of single records would make a zigzag."""
LONG_NUMBER = 10_000
RATE = "rows_per_second"
Panels = dict[str, dict[str, list[tuple[int, float]]]]
"""Metric -> series (`train`, `eval`, or the name of an evaluation set) -> steps, values."""


def draw_curves(records: Sequence[Record], path: Path, title: str | None = None) -> None:
    """Draw every metric and figure over the steps, one panel each, and rows per second.

    The title is the folder's name by default. The previous file stays at `path` until the new one
    is complete.
    """
    panels = [*panels_of(records).items(), (RATE, {"train": rates_of(records)})]
    count = len(panels)
    rows = -(-count // COLUMNS)
    columns = -(-count // rows)
    title = title or path.parent.resolve().name
    wide, high = PANEL_INCHES
    file = io.BytesIO()
    with picture(file, wide * columns, high * rows + 0.3) as figure:
        size = min(11.0, 118 * wide * columns / len(title))  # points that fit the picture's width
        figure.suptitle(title, parse_math=False, fontsize=size)
        axes = list(figure.subplots(rows, columns, squeeze=False).flat)
        for axis, (name, series) in zip(axes, panels, strict=False):
            _draw_panel(axis, name, series)
        if panels[0][0] == "loss":
            losses = [y for points in panels[0][1].values() for _, y in points if math.isfinite(y)]
            if losses and min(losses) > 0 and max(losses) / min(losses) > LOG_SCALE_FROM:
                axes[0].set_yscale("log")
        axes[count - 1].set_ylim(bottom=0)
        for axis in axes[count:]:
            axis.set_visible(False)
    write_whole(path, file.getvalue())


def title_of(config: Mapping[str, Any], run: str) -> str:
    """Return `mlp on 4 cpu devices · mlp-20261125-194006`: what ran, where, and the run."""
    parallel, command = config["parallel"], config["start"]["command"]
    what = config.get("recipe") or Path(command[0]).name
    devices = math.prod(parallel["mesh"].values())
    return f"{what} on {counted(devices, parallel['device_kind'] + ' device')} · {run}"


def panels_of(records: Sequence[Record]) -> Panels:
    """Return the series of each panel: the loss first, then other metrics and figures.

    The evaluation metric `dev/loss` becomes the series `dev` next to the training loss.
    """
    panels: Panels = {}
    trained = {name for r in records if r.kind == "train" for name in r.metrics}
    for record in records:
        figures = record.figures or {} if record.kind == "train" else {}
        for name, value in {**record.metrics, **figures}.items():
            panel, series = name, record.kind
            group, slash, metric = name.rpartition("/")
            if series == "eval" and slash and name not in trained:
                panel, series = metric, group
            if record.kind in ("train", "eval"):
                panels.setdefault(panel, {}).setdefault(series, []).append((record.step, value))
    return {name: panels[name] for name in sorted(panels, key=lambda name: name != "loss")}


def rates_of(records: Sequence[Record]) -> list[tuple[int, float]]:
    """Return steps and rows per second of the timed train records, over equal parts of the time."""
    timed = [record for record in records if record.kind == "train" and record.seconds > 0]
    points = min(max(len(timed) // RECORDS_OF_RATE, FEWEST_RATES), MOST_RATES)
    least = math.fsum(record.seconds for record in timed) / points
    groups = list[list[Record]]()
    for record in timed:
        if not groups or _seconds(groups[-1]) >= least:
            groups.append([])
        groups[-1].append(record)
    if len(groups) > 1 and _seconds(groups[-1]) < least / 2:
        groups[-2:] = [groups[-2] + groups[-1]]
    return [(group[-1].step, sum(r.rows for r in group) / _seconds(group)) for group in groups]


def _seconds(records: Sequence[Record]) -> float:
    return math.fsum(record.seconds for record in records)


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
        axis.legend()
    axis.set_xlabel("step")
    axis.xaxis.get_major_locator().set_params(integer=True, nbins=5)
    axis.xaxis.set_major_formatter(_short())
    axis.yaxis.set_major_formatter(_short())
    axis.grid()


def _groups(items: Sequence[Any], most: int) -> list[Sequence[Any]]:
    size = max(-(-len(items) // most), 1)
    return [items[at : at + size] for at in range(0, len(items), size)]


def _mean(values: list[float]) -> float:
    return fmean([value for value in values if math.isfinite(value)] or [math.nan])


def _short() -> Any:
    """Return a formatter for `0.0003`, `1,500`, `50k` or `1.5M`, without an offset on the axis."""
    ticker = require("matplotlib.ticker", "cli")
    long = ticker.EngFormatter(sep="")

    def text(value: float, _place: int) -> str:
        return str(long(value)) if abs(value) >= LONG_NUMBER else f"{value:g}"

    return ticker.FuncFormatter(text)


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
            records = read_records(folder, sys.maxsize).records
            title = title_of(read_config(folder / CONFIG), folder.name)
            draw_curves(records, folder / CURVES, title)
    except Exception as error:  # the run that started this may be over
        if not folder.exists():  # removed since
            return 0
        print(f"replicax: no {folder / CURVES}: {first_line(error)}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(draw_run(place(sys.argv[1])))
