"""Plot of memory over time."""

from pathlib import Path

import numpy as np

from replicax.bench.memory_curve import BACKWARD, FORWARD, IDLE, PHASES, REDUCTION, UPDATE, Timeline
from replicax.text.plot_style import INK, ON_COLOUR, picture
from replicax.text.wording import number_text

COLOURS = {
    FORWARD: "#56B4E9",
    BACKWARD: "#E69F00",
    REDUCTION: "#CC79A7",
    UPDATE: "#009E73",
    IDLE: "#7F7F7F40",
}
STATE_COLOUR = "#919191"
_COLUMNS = 1000
"""Number of columns of the plot. Each shows its maximum, so peaks stay visible and gaps of
microseconds between two instructions do not."""
LOW_STATE = 0.1
"""Share of the plot's height below which the train state's label no longer fits under its
line."""
LEGEND_IDLE = 0.005
"""Share of the time from which on an idle device is in the legend."""


def draw_memory(timeline: Timeline, path: Path, title: str) -> None:
    """Draw memory over time, coloured by phase, stacked on the train state.

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    power = min(int(np.log2(max(timeline.peak, 1))) // 10, 3)
    unit, divisor = ("B", "KiB", "MiB", "GiB")[power], 1 << 10 * power
    scale = 1e3 if timeline.measured else 1.0
    time, most, phase = _columns(timeline)
    time, used, state = time * scale, most / divisor, timeline.state_bytes / divisor
    sides, heights = np.repeat(time, 2)[1:-1], np.repeat(used, 2)
    peak = timeline.peak / divisor
    named = set(timeline.phase)
    if np.mean(phase == IDLE) < LEGEND_IDLE:
        named.discard(IDLE)
    with picture(path, 8, 4.6) as figure:
        axis = figure.subplots()
        for name in (*PHASES, IDLE):
            # An idle device holds the state only: up to the top, to be seen.
            top = np.full_like(heights, peak) if name == IDLE else heights
            mine, label = np.repeat(phase == name, 2), name if name in named else None
            axis.fill_between(
                sides, state, top, mine, color=COLOURS[name], linewidth=0, label=label
            )
        axis.fill_between(sides, 0, state, color=STATE_COLOUR, linewidth=0)
        axis.stairs(used, time, baseline=None, color=INK, linewidth=0.8)
        axis.set_xlim(time[0], time[-1])
        axis.set_ylim(0, peak * 1.12)
        reserved = number_text(timeline.reserved_bytes / divisor)
        gaps = f", {reserved} {unit} reserved" if reserved != number_text(peak) else ""
        low = state < LOW_STATE * peak
        for height, text, inside in (
            (state, f"train state {number_text(state)} {unit}", not low),
            (peak, f"peak {number_text(peak)} {unit}{gaps}", False),
        ):
            axis.axhline(height, color=INK, linestyle="--", linewidth=1)
            axis.annotate(
                text,
                (time[-1], height),
                xytext=(-4, -4 if inside else 3),
                textcoords="offset points",
                ha="right",
                va="top" if inside else "bottom",
                color=INK if height == peak else ON_COLOUR,
                bbox={"facecolor": STATE_COLOUR, "alpha": 0.7, "linewidth": 0, "pad": 1}
                if low and height == state
                else None,
            )
        axis.set_ylabel(f"memory of one device [{unit}]")
        axis.set_xlabel(
            "time [ms], as profiled" if timeline.measured else "instructions run (not to scale)"
        )
        axis.set_title(title, pad=24)
        across = axis.get_xaxis_transform()
        for number, start in enumerate(timeline.steps):
            axis.axvline(start * scale, color=INK, linewidth=0.8, linestyle=":")
            axis.text(start * scale, 1.01, f" step {number + 1}", transform=across, va="bottom")
        figure.legend(loc="outside upper center", ncols=len(COLOURS))


def _columns(timeline: Timeline) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Divide the time into equal parts; return their edges, maximum bytes and middle phase."""
    edges = np.linspace(timeline.edges[0], timeline.edges[-1], _COLUMNS + 1)
    first = np.searchsorted(timeline.edges, edges[:-1], "right") - 1
    after = np.maximum(np.searchsorted(timeline.edges, edges[1:], "left"), first + 1)
    most = [timeline.bytes[a:b].max() for a, b in zip(first, after, strict=True)]
    middle = np.searchsorted(timeline.edges, (edges[:-1] + edges[1:]) / 2, "right") - 1
    return edges, np.asarray(most, np.int64), np.asarray(timeline.phase)[middle]
