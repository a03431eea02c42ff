"""A timeline of memory -> a picture of it."""

from pathlib import Path
from typing import Any

import numpy as np

from replicax.bench.memory_curve import BACKWARD, FORWARD, IDLE, PHASES, REDUCTION, UPDATE, Timeline
from replicax.errors import require

# Okabe and Ito's colours, told apart with any kind of colour vision; text of the same hue is
# darker, to be read on white.
COLOURS = {
    FORWARD: "#56B4E9",
    BACKWARD: "#E69F00",
    REDUCTION: "#CC79A7",
    UPDATE: "#009E73",
    IDLE: "#DDDDDD",
}
TEXT_COLOURS = {
    FORWARD: "#0B6BA8",
    BACKWARD: "#9A6700",
    REDUCTION: "#A3407A",
    UPDATE: "#00684C",
}
STATE_COLOUR = "#B8B8B8"
COLUMNS = 1000
"""Parts that the width has. Of what changes within one, the most is drawn: a peak is seen and a gap
of microseconds between two instructions is not."""
SHORTEST = 4
"""Columns. A run of a phase that is shorter is drawn as the one before, unless its phase has none
in this step that is much longer."""
NEARLY = 0.5
"""Of a phase's longest run: shorter ones are much shorter. The first that is not has the label."""
LABEL_GAP = 0.012
"""Of the width, between two labels."""
LOW_STATE = 0.1
"""Of the height: a train state that takes less leaves no room for its label below the line."""


def draw_memory(timeline: Timeline, path: Path, title: str) -> None:
    """Draw memory over time, coloured and labelled by phase, over what the train state takes.

    Args:
        timeline: as `replicax.bench.memory_curve.measure_timeline` gives it.
        path: of a picture, in the format of its suffix.
        title: above it.

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    figure_module = require("matplotlib.figure", "cli")
    figure = figure_module.Figure(figsize=(8, 4.6), layout="constrained")
    axis = figure.subplots()
    unit, divisor = _unit(timeline.peak)
    scale = 1e3 if timeline.measured else 1.0
    time, most, phase = _columns(timeline)
    time, used, state = time * scale, most / divisor, timeline.state_bytes / divisor
    sides, heights = np.repeat(time, 2)[1:-1], np.repeat(used, 2)
    for name in (*PHASES, IDLE):
        mine = np.repeat([each == name for each in phase], 2)
        axis.fill_between(sides, state, heights, mine, color=COLOURS[name], linewidth=0)
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
    # In two rows above the axes: the phases, and the steps.
    axis.set_title(title, pad=46)
    figure.draw_without_rendering()
    labelled = []
    for number, runs in enumerate(_steps(timeline)):
        start, end = runs[0][0] * scale, runs[-1][1] * scale
        _mark_step(axis, number + 1, start, end)
        labelled += [
            ((low + high) / 2 * scale, name) for (low, high, name), *_ in _main_runs(runs).values()
        ]
    _label_phases(axis, sorted(labelled))
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


Run = tuple[float, float, str]
"""Start, end and phase of neighbouring segments of one phase."""


def _steps(timeline: Timeline) -> list[list[Run]]:
    """The runs of each step, in order, without the time between steps."""
    starts = [
        at
        for at, name in enumerate(timeline.phase)
        if not at or name != timeline.phase[at - 1] or timeline.edges[at] in timeline.steps
    ]
    steps: list[list[Run]] = [[] for _ in timeline.steps]
    for at, after in zip(starts, [*starts[1:], len(timeline.phase)], strict=True):
        if timeline.phase[at] != IDLE:
            start = float(timeline.edges[at])
            step = max(0, int(np.searchsorted(timeline.steps, start, "right")) - 1)
            steps[step].append((start, float(timeline.edges[after]), timeline.phase[at]))
    return [runs for runs in steps if runs]


def _main_runs(runs: list[Run]) -> dict[str, list[Run]]:
    """The runs of each phase that are nearly as long as its longest."""
    longest: dict[str, float] = {}
    for start, end, name in runs:
        longest[name] = max(end - start, longest.get(name, 0.0))
    found: dict[str, list[Run]] = {}
    for start, end, name in runs:
        if end - start >= NEARLY * longest[name]:
            found.setdefault(name, []).append((start, end, name))
    return found


def _columns(timeline: Timeline) -> tuple[np.ndarray, np.ndarray, list[str]]:
    """Edges, most bytes and phase of equal parts of the time."""
    edges = np.linspace(timeline.edges[0], timeline.edges[-1], COLUMNS + 1)
    first = np.searchsorted(timeline.edges, edges[:-1], "right") - 1
    after = np.maximum(np.searchsorted(timeline.edges, edges[1:], "left"), first + 1)
    most = np.asarray(
        [timeline.bytes[a:b].max() for a, b in zip(first, after, strict=True)], np.int64
    )
    phase = [IDLE] * COLUMNS
    shortest = SHORTEST * (edges[1] - edges[0])
    for runs in _steps(timeline):
        main = _main_runs(runs)
        before = runs[0][2]
        for start, end, name in runs:
            if end - start >= shortest or (start, end, name) in main[name]:
                before = name
            low = int(np.searchsorted(edges, start, "right")) - 1
            high = int(np.searchsorted(edges, end, "left"))
            phase[low:high] = [before] * (high - low)
    return edges, most, phase


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


def _mark_step(axis: Any, number: int, start: float, end: float) -> None:
    across = axis.get_xaxis_transform()
    axis.axvline(start, color="#333333", linewidth=0.8, linestyle=":")
    axis.plot([start, end], [1.115, 1.115], transform=across, color="#333333", lw=1, clip_on=False)
    axis.text(
        (start + end) / 2, 1.125, f"step {number}", transform=across, ha="center", va="bottom"
    )


def _label_phases(axis: Any, labels: list[tuple[float, str]]) -> None:
    """The name of each phase over the run that bears it, moved aside where names would overlap."""
    across = axis.get_xaxis_transform()
    texts = [
        axis.text(at, 1.035, name, transform=across, ha="center", va="bottom", fontsize=10)
        for at, name in labels
    ]
    to_data = axis.transData.inverted()
    widths = []
    for text in texts:
        box = text.get_window_extent()
        (left, _), (right, _) = to_data.transform([(box.x0, 0), (box.x1, 0)])
        widths.append(right - left)
    gap = LABEL_GAP * np.ptp(axis.get_xlim())
    centres = _apart([at for at, _ in labels], widths, gap, *axis.get_xlim())
    for text, centre, (at, name) in zip(texts, centres, labels, strict=True):
        text.set_x(centre)
        text.set_color(TEXT_COLOURS[name])
        line = axis.plot([at, centre], [1.0, 1.03], transform=across, color=TEXT_COLOURS[name])
        line[0].set(linewidth=0.8, clip_on=False)


def _apart(
    wanted: list[float], widths: list[float], gap: float, low: float, high: float
) -> list[float]:
    """Centres near the wanted ones, in their order, of intervals that do not overlap."""
    centres = list(wanted)
    edge = low
    for at, width in enumerate(widths):
        centres[at] = max(centres[at], edge + width / 2)
        edge = centres[at] + width / 2 + gap
    edge = high
    for at in reversed(range(len(widths))):
        centres[at] = min(centres[at], edge - widths[at] / 2)
        edge = centres[at] - widths[at] / 2 - gap
    return centres
