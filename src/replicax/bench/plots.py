"""A bench as a picture: throughput and efficiency by device count."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from replicax.bench.bench_result import Bench, CaseResult, by_mode
from replicax.bench.cases import STRONG, WEAK
from replicax.bench.numbers import spread
from replicax.core.modes import MODES, as_mode
from replicax.errors import require

# Okabe and Ito's colours, told apart with any kind of colour vision, and markers without one.
STYLES = (
    ("#000000", "X"),
    ("#0072B2", "o"),
    ("#D55E00", "s"),
    ("#009E73", "^"),
    ("#CC79A7", "D"),
    ("#56B4E9", "v"),
    ("#E69F00", "P"),
    ("#F0E442", "*"),
)
IDEAL = "#7F7F7F"
BESIDE = 0.02
"""Share of the width between neighbouring modes on the same devices, lest they hide each other."""

Values = Callable[[CaseResult], Sequence[float]]


def draw_scaling(bench: Bench, path: Path) -> None:
    """Draw throughput and efficiency by device count; bars where there is one count.

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    figure_module = require("matplotlib.figure", "cli")
    figure = figure_module.Figure(figsize=(9.0, 4.4), layout="constrained")
    figure.suptitle(picture_title(bench), fontsize=11)
    left, right = figure.subplots(1, 2)
    if len({case.devices for case in bench.cases}) == 1:
        _draw_bars(left, bench, _rate, f"{_unit(bench)} per second")
        _draw_bars(right, bench, _milliseconds, "milliseconds per step")
    else:
        _draw_throughput(left, bench)
        _draw_efficiency(right, bench)
    for axis in (left, right):
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.25, axis="y")
        axis.set_axisbelow(True)
    figure.savefig(path, dpi=150)


def _style(mode: str) -> tuple[str, str]:
    """Return the colour and the marker of a mode, by its place in the table."""
    return STYLES[list(MODES).index(mode) % len(STYLES)]


def _draw_throughput(axis: Any, bench: Bench) -> None:
    """Draw the strong scaling, with the line that the fastest on the fewest devices would follow.

    Of the weak one where there is no other.
    """
    strong = bench.scaling(STRONG)
    cases = strong or bench.scaling(WEAK)
    counts = _counts(cases)
    first = max(spread(_rate(case))[0] for case in cases if case.devices == counts[0])
    axis.plot(
        counts,
        [first * count / counts[0] for count in counts],
        color=IDEAL,
        linestyle="--",
        linewidth=1.2,
        label="ideal",
    )
    _draw_modes(axis, cases, _rate, linestyle="-")
    axis.set_ylabel(f"{_unit(bench)} per second")
    _use_log_scale(axis)  # on which what is ideal is a straight line
    weak = f"weak: {cases[0].rows_per_device:,} rows a {bench.replica}"
    axis.set_title(f"strong: {bench.batch_size:,} rows a batch" if strong else weak, fontsize=10)
    _dress_counts(axis, counts, bench.scaled_over)
    axis.legend(frameon=False, loc="upper left")


def _draw_efficiency(axis: Any, bench: Bench) -> None:
    """Draw both scalings: strong in solid lines, weak in dashed ones."""
    axis.axhline(100, color=IDEAL, linestyle=":", linewidth=1.2)
    for scaling, linestyle in ((STRONG, "-"), (WEAK, "--")):
        cases = [case for case in bench.scaling(scaling) if as_mode(case.mode).most_devices != 1]
        _draw_modes(axis, cases, _efficiency(scaling), linestyle=linestyle, labelled=False)
        if cases:
            axis.plot([], [], color="#404040", linestyle=linestyle, label=scaling)
    axis.set_ylabel("efficiency in %")
    axis.set_ylim(0, max(110, axis.get_ylim()[1]))
    weak = bench.scaling(WEAK)
    rows = f"; weak: {weak[0].rows_per_device:,} rows a {bench.replica}" if weak else ""
    axis.set_title(f"relative to {_counted(bench, _counts(bench.cases)[0])}{rows}", fontsize=10)
    _dress_counts(axis, _counts(bench.cases), bench.scaled_over)
    axis.legend(frameon=False, loc="lower left")


def _draw_modes(
    axis: Any, cases: Sequence[CaseResult], values: Values, *, linestyle: str, labelled: bool = True
) -> None:
    """A line for each mode: medians, with bars from quartile to quartile."""
    modes = list(dict.fromkeys(case.mode for case in cases))
    span = max(2.0, *(case.devices / cases[0].devices for case in cases)) if cases else 1.0
    for place, mode in enumerate(modes):
        own = [case for case in cases if case.mode == mode]
        aside = span ** (BESIDE * (place - (len(modes) - 1) / 2 + (linestyle == "--") / 2))
        middles, bars = _medians(map(values, own))
        colour, marker = _style(mode)
        axis.errorbar(
            [case.devices * aside for case in own],
            middles,
            yerr=bars,
            color=colour,
            marker=marker,
            markersize=6,
            markerfacecolor=colour if linestyle == "-" else "white",
            linestyle=linestyle,
            linewidth=1.4,
            capsize=3,
            label=mode if labelled else None,
        )


def _draw_bars(axis: Any, bench: Bench, values: Values, label: str) -> None:
    """A bar for each mode."""
    cases = bench.scaling(STRONG)
    middles, bars = _medians(map(values, cases))
    axis.bar(
        [case.mode for case in cases],
        middles,
        yerr=bars,
        color=[_style(case.mode)[0] for case in cases],
        width=0.6,
        capsize=4,
        ecolor="#404040",
    )
    axis.set_ylabel(label)
    axis.set_xlabel("mode")
    axis.set_title(f"{bench.batch_size:,} rows on {_counted(bench, cases[0].devices)}", fontsize=10)
    axis.yaxis.set_major_formatter(_thousands(axis.get_ylim()[1]))


def _dress_counts(axis: Any, counts: Sequence[int], label: str) -> None:
    axis.set_xscale("log", base=2)
    axis.set_xticks(counts, [str(count) for count in counts], minor=False)
    axis.set_xticks([], minor=True)
    axis.set_xlim(counts[0] / 1.2, counts[-1] * 1.2)
    axis.set_xlabel(label)


def _use_log_scale(axis: Any) -> None:
    """A logarithmic y axis with plain numbers, as many as there is room for."""
    ticker = require("matplotlib.ticker", "cli")
    axis.set_yscale("log")
    low, high = axis.get_ylim()
    is_wide = high / low > 12
    subs = (1, 2, 5) if is_wide else (1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8)
    axis.yaxis.set_major_locator(ticker.LogLocator(10, subs=subs))
    axis.yaxis.set_major_formatter(_thousands(high))
    axis.yaxis.set_minor_locator(ticker.NullLocator())


def _medians(samples: Iterable[Sequence[float]]) -> tuple[np.ndarray, np.ndarray]:
    """Medians, and how far the quartiles are from them, below and above."""
    middles, lows, highs = np.asarray([spread(values) for values in samples]).T
    return middles, np.stack([middles - lows, highs - middles])


def _rate(case: CaseResult) -> Sequence[float]:
    return case.tokens_per_second or case.rows_per_second


def _milliseconds(case: CaseResult) -> Sequence[float]:
    return [1e3 * seconds for seconds in case.seconds_per_step]


def _efficiency(scaling: str) -> Values:
    return lambda case: [100 * value for value in case.efficiency[scaling]]


def _thousands(highest: float) -> str:
    """A format for ticks: thousands parted, decimals where the numbers are small."""
    return "{x:,.0f}" if highest >= 10 else "{x:.2g}"


def _unit(bench: Bench) -> str:
    return "tokens" if all(case.tokens_per_second for case in bench.cases) else "rows"


def _counts(cases: Sequence[CaseResult]) -> list[int]:
    return sorted({case.devices for case in cases})


def _counted(bench: Bench, count: int) -> str:
    return f"{count} {bench.scaled_over if count > 1 else bench.replica}"


def picture_title(bench: Bench) -> str:
    """Return what was measured, and on which devices, for the top of a picture."""
    cores = bench.environment["cores"]
    shared = ""
    if bench.platform == "cpu":
        shared = f", one core a {bench.replica}" if bench.pinned else f" that share {cores} cores"
    return (
        f"{bench.parameters:,} parameters · {bench.device_kind} devices{shared} · {bench.precision}"
        f"{'' if bench.compares_layouts else f' · layout {bench.layout}'}"
    )


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
    middles, bars = _medians([_milliseconds(case) for case in cases])
    time.barh(places, middles, xerr=bars, color=TIME, height=0.6, capsize=3, ecolor="#404040")
    _write(time, middles + bars[1], middles)
    time.set_xlabel("milliseconds per step, median and quartiles")
    state = [(case.layout.state_bytes_per_device if case.layout else 0) / MIB for case in cases]
    peak = [(case.peak_bytes_per_device or 0) / MIB for case in cases]
    rest = [max(most - own, 0) for most, own in zip(peak, state, strict=True)]
    memory.barh(places, state, color=STATE, height=0.6, label="train state")
    memory.barh(places, rest, left=state, color=REST, height=0.6, label="the step, at its peak")
    ends = [own + more for own, more in zip(state, rest, strict=True)]
    _write(memory, ends, ends)
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


def _write(axis: Any, ends: Sequence[float] | np.ndarray, values: Iterable[float]) -> None:
    """The figure of each bar beside its end, and room for it."""
    for place, (end, value) in enumerate(zip(ends, values, strict=True)):
        text = f"{value:,.3g}" if value < 1e3 else f"{value:,.0f}"
        axis.annotate(
            text, (end, place), xytext=(5, 0), textcoords="offset points", va="center", fontsize=9
        )
    axis.set_xlim(0, 1.18 * max(ends))
