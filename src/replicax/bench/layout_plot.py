"""Layouts as a picture: time of a step and memory of a device, side by side."""

from pathlib import Path
from typing import Any

from replicax.bench.plots import picture_title, quartile_bars
from replicax.bench.result import Bench, by_mode
from replicax.bench.timing import spread
from replicax.errors import require

TIME, STATE, REST = "#0072B2", "#009E73", "#E69F00"
MIB = 2**20


def draw_layouts(bench: Bench, path: Path) -> None:
    """Draw a bar for each layout: milliseconds a step, and beside it memory of a device.

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    figure_of_layouts(bench).savefig(path, dpi=150)


def figure_of_layouts(bench: Bench) -> Any:
    """Return the figure that `draw_layouts` writes."""
    figure_module = require("matplotlib.figure", "cli")
    cases = by_mode(bench.cases)
    size = (10.0, 1.9 + 0.42 * len(cases))
    figure = figure_module.Figure(figsize=size, layout="constrained")
    figure.suptitle(f"{picture_title(bench)} · {bench.batch_size:,} rows a batch", fontsize=11)
    time, memory = figure.subplots(1, 2, sharey=True)
    places = range(len(cases))
    middles, lows, highs = zip(
        *(spread([1e3 * each for each in case.seconds_per_step]) for case in cases), strict=True
    )
    errors = quartile_bars(middles, lows, highs)
    time.barh(places, middles, xerr=errors, color=TIME, height=0.6, capsize=3, ecolor="#404040")
    _write(
        time, highs, [f"{middle:,.3g}" if middle < 1e3 else f"{middle:,.0f}" for middle in middles]
    )
    time.set_xlabel("milliseconds per step, median and quartiles")
    state = [(case.layout.state_bytes_per_device if case.layout else 0) / MIB for case in cases]
    peak = [(case.peak_bytes_per_device or 0) / MIB for case in cases]
    rest = [max(most - own, 0) for most, own in zip(peak, state, strict=True)]
    memory.barh(places, state, color=STATE, height=0.6, label="train state")
    memory.barh(places, rest, left=state, color=REST, height=0.6, label="the step, at its peak")
    ends = [own + more for own, more in zip(state, rest, strict=True)]
    _write(memory, ends, [f"{end:,.3g}" if end < 1e3 else f"{end:,.0f}" for end in ends])
    memory.set_xlabel("memory of a device in MiB")
    names = [f"{case.name}, {case.devices} device{'s' * (case.devices > 1)}" for case in cases]
    time.set_yticks(places, names)
    time.invert_yaxis()
    figure.legend(loc="outside lower right", ncols=2, frameon=False)
    for axis in (time, memory):
        axis.spines[["top", "right"]].set_visible(False)
        axis.locator_params(axis="x", nbins=5)
        axis.xaxis.set_major_formatter("{x:,g}")
        axis.grid(alpha=0.25, axis="x")
        axis.set_axisbelow(True)
    return figure


def _write(axis: Any, ends: Any, texts: list[str]) -> None:
    """The figure of each bar beside its end, and room for it."""
    for place, (end, text) in enumerate(zip(ends, texts, strict=True)):
        axis.annotate(
            text, (end, place), xytext=(5, 0), textcoords="offset points", va="center", fontsize=9
        )
    axis.set_xlim(0, 1.18 * max(ends))
