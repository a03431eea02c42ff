"""A timeline of memory -> a picture of it."""

from pathlib import Path
from typing import Any

import numpy as np

from replicax.bench.memory_curve import BACKWARD, FORWARD, IDLE, PHASES, REDUCTION, UPDATE, Timeline
from replicax.errors import require

# Okabe and Ito's colours, told apart with any kind of colour vision.
COLOURS = {
    FORWARD: "#56B4E9",
    BACKWARD: "#E69F00",
    REDUCTION: "#CC79A7",
    UPDATE: "#009E73",
    IDLE: "#DDDDDD",
}
STATE_COLOUR = "#B8B8B8"
COLUMNS = 1000
"""Parts that the width has. Of what changes within one, the most is drawn: a peak is seen and a gap
of microseconds between two instructions is not."""
LOW_STATE = 0.1
"""Share of the height: a train state that takes less leaves no room for its label below the
line."""


def draw_memory(timeline: Timeline, path: Path, title: str) -> None:
    """Draw memory over time, coloured by phase, over what the train state takes.

    Args:
        timeline: as `replicax.bench.memory_curve.measure_timeline` gives it.
        path: of a picture, in the format of its suffix.
        title: above it.

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    figure = require("matplotlib.figure", "cli").Figure(figsize=(8, 4.6), layout="constrained")
    axis = figure.subplots()
    unit, divisor = _unit(timeline.peak)
    scale = 1e3 if timeline.measured else 1.0
    time, most, phase = _columns(timeline)
    time, used, state = time * scale, most / divisor, timeline.state_bytes / divisor
    sides, heights = np.repeat(time, 2)[1:-1], np.repeat(used, 2)
    for name in (*PHASES, IDLE):
        mine = np.repeat(phase == name, 2)
        label = name if name in timeline.phase and name != IDLE else None
        axis.fill_between(
            sides, state, heights, mine, color=COLOURS[name], linewidth=0, label=label
        )
    axis.fill_between(sides, 0, state, color=STATE_COLOUR, linewidth=0)
    axis.stairs(used, time, baseline=None, color="#333333", linewidth=0.8)
    peak = timeline.peak / divisor
    for height in (state, peak):
        axis.axhline(height, color="black", linestyle="--", linewidth=1)
    axis.set_xlim(time[0], time[-1])
    axis.set_ylim(0, peak * 1.12)
    low = state < LOW_STATE * peak
    _write(axis, time[-1], state, f"train state {_figure(state)} {unit}", above=low)
    reserved = _figure(timeline.reserved_bytes / divisor)
    gaps = f", {reserved} {unit} reserved" if reserved != _figure(peak) else ""
    _write(axis, time[-1], peak, f"peak {_figure(peak)} {unit}{gaps}", above=True)
    axis.set_ylabel(f"memory of one device [{unit}]")
    axis.set_xlabel(
        "time [ms], as profiled" if timeline.measured else "instructions run (not to scale of time)"
    )
    axis.spines[["top", "right"]].set_visible(False)
    axis.set_title(title, pad=24)
    across = axis.get_xaxis_transform()
    for number, start in enumerate(timeline.steps):
        axis.axvline(start * scale, color="#333333", linewidth=0.8, linestyle=":")
        axis.text(start * scale, 1.01, f" step {number + 1}", transform=across, va="bottom")
    figure.legend(loc="outside upper center", ncols=len(PHASES), frameon=False)
    figure.savefig(path, dpi=150)


def _unit(size: int) -> tuple[str, int]:
    """The unit that leaves one to four digits before the point, and its bytes."""
    for name, power in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if size >= 1 << power:
            return name, 1 << power
    return "B", 1


def _figure(value: float) -> str:
    """Three significant digits, or all before the point."""
    return f"{value:.{max(0, 2 - int(np.log10(max(value, 1))))}f}"


def _columns(timeline: Timeline) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Edges, most bytes and longest phase of equal parts of the time."""
    edges = np.linspace(timeline.edges[0], timeline.edges[-1], COLUMNS + 1)
    first = np.searchsorted(timeline.edges, edges[:-1], "right") - 1
    after = np.maximum(np.searchsorted(timeline.edges, edges[1:], "left"), first + 1)
    spans = list(zip(first, after, strict=True))
    most = np.asarray([timeline.bytes[a:b].max() for a, b in spans], np.int64)
    names = np.asarray(timeline.phase)
    longest = []
    for (a, b), low, high in zip(spans, edges[:-1], edges[1:], strict=True):
        seconds = np.diff(np.clip(timeline.edges[a : b + 1], low, high))
        share = {name: seconds[names[a:b] == name].sum() for name in (*PHASES, IDLE)}
        longest.append(max(share, key=share.__getitem__))
    return edges, most, np.asarray(longest)


def _write(axis: Any, right: float, height: float, text: str, *, above: bool) -> None:
    axis.annotate(
        text,
        (right, height),
        xytext=(-4, 3 if above else -4),
        textcoords="offset points",
        ha="right",
        va="bottom" if above else "top",
        fontsize=10,
        bbox={"facecolor": "white", "alpha": 0.7, "linewidth": 0, "pad": 1} if above else None,
    )
