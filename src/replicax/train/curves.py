"""Records -> a picture of the run."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from replicax.errors import require
from replicax.train.hook import Hook
from replicax.train.records import Record

# Okabe and Ito's colours, told apart with any kind of colour vision.
COLOURS = {"train": "#0072B2", "eval": "#D55E00"}
COLUMNS = 4
MOST_MARKERS = 20
LOG_SCALE_FROM = 30.0
"""Largest loss over smallest from which a linear axis would hide the end of a run."""


def draw_curves(records: Sequence[Record], path: Path, title: str) -> None:
    """Draw every metric over the steps, one panel each, and rows per second.

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    figure_module = require("matplotlib.figure", "cli")
    names = list(dict.fromkeys(name for record in records for name in record.metrics))
    names.sort(key=lambda name: name != "loss")
    panels = len(names) + 1
    rows, columns = -(-panels // COLUMNS), min(panels, COLUMNS)
    figure = figure_module.Figure(figsize=(4.2 * columns, 3.3 * rows), layout="constrained")
    figure.suptitle(title)
    axes = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axis, name in zip(axes, names, strict=False):
        for kind in COLOURS:
            _plot(axis, kind, [(r.step, r.metrics[name]) for r in _having(records, kind, name)])
        axis.set_ylabel(name)
        axis.legend(frameon=False)
    _use_log_scale(axes[0], [r.metrics["loss"] for r in records if "loss" in r.metrics])
    rates = [(r.step, r.rows_per_second) for r in records if r.kind == "train" and r.seconds > 0]
    _plot(axes[panels - 1], "train", rates)
    axes[panels - 1].set_ylabel("rows per second")
    axes[panels - 1].set_ylim(bottom=0)
    axes[panels - 1].yaxis.set_major_formatter("{x:,.0f}")
    for axis in axes[:panels]:
        _dress(axis)
    for axis in axes[panels:]:
        axis.set_visible(False)
    figure.savefig(path, dpi=150)


def _having(records: Sequence[Record], kind: str, name: str) -> list[Record]:
    return [record for record in records if record.kind == kind and name in record.metrics]


def _plot(axis: Any, kind: str, points: list[tuple[int, float]]) -> None:
    if not points:
        return
    # One point has no line, and many markers hide theirs.
    few = len(points) == 1 or (kind == "eval" and len(points) <= MOST_MARKERS)
    steps, values = zip(*points, strict=True)
    axis.plot(
        steps,
        values,
        color=COLOURS[kind],
        label=kind,
        marker="o" if few else None,
        linewidth=1.2,
        markersize=4,
    )


def _use_log_scale(axis: Any, losses: list[float]) -> None:
    if losses and min(losses) > 0 and max(losses) / min(losses) > LOG_SCALE_FROM:
        axis.set_yscale("log")


def _dress(axis: Any) -> None:
    axis.set_xlabel("step")
    axis.xaxis.get_major_locator().set_params(integer=True)
    axis.xaxis.set_major_formatter("{x:,.0f}")
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(alpha=0.25)


class Curves(Hook):
    """Draws."""
