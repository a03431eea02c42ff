"""Plots of a benchmark: throughput and efficiency by device count, or bars."""

import textwrap
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np

from replicax.bench.bench_result import Bench, CaseResult, by_mode
from replicax.bench.cases import STRONG, WEAK
from replicax.bench.numbers import is_noise, spread
from replicax.core.modes.mode_table import MODES, as_mode
from replicax.errors import require
from replicax.text.plot_style import INK, PALETTE, picture

# With markers for black-and-white prints.
STYLES = tuple(zip((INK, *PALETTE), "Xos^DPv", strict=True))
TIME, STATE, REST = "#56B4E9", "#009E73", "#E69F00"
BESIDE = 0.02
"""Horizontal offset between modes on the same devices, as a share of the width."""


def draw_bench(bench: Bench, file: Path | IO[bytes]) -> None:
    """Plot throughput and efficiency by device count, or the time and memory of each case.

    The latter if layouts are compared, or all cases run on the same number of devices. Below stand
    the notes of the benchmark.

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    is_bars = bench.compares_layouts or len(_counts(bench.cases)) == 1
    width, height = (10.0, 1.9 + 0.42 * len(bench.cases)) if is_bars else (9.0, 4.4)
    notes = [line for note in bench.notes for line in textwrap.wrap(note, int(13 * width))]
    with picture(file, width, height + 0.18 * len(notes)) as figure:
        left, right = axes = figure.subplots(1, 2, sharey=is_bars)
        title = _title(bench)
        if is_bars:
            title += f" · {bench.batch_size:,} rows per batch"
            _draw_time(left, by_mode(bench.cases), bench)
            _draw_memory(right, by_mode(bench.cases))
            right.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=2)
        else:
            _draw_throughput(left, bench)
            _draw_efficiency(right, bench)
        figure.suptitle(title, fontsize=11)
        if notes:
            figure.supxlabel("\n".join(notes), fontsize=9, parse_math=False)
        for axis in axes:
            axis.grid(axis="x" if is_bars else "y")
            if not is_bars:
                counts = _counts(bench.cases)
                axis.set_xscale("log", base=2)
                axis.set_xticks(counts, map(str, counts), minor=False)
                axis.set_xticks([], minor=True)
                axis.set_xlim(counts[0] / 1.2, counts[-1] * 1.2)
                axis.set_xlabel(bench.scaled_over)
                axis.legend()


def _title(bench: Bench) -> str:
    shared = ""
    if bench.platform == "cpu":
        cores = f" sharing {bench.environment['cores']} cores"
        shared = f", one core per {bench.replica}" if bench.pinned else cores
    return (
        f"{bench.parameters:,} parameters · {bench.device_kind} devices{shared} · {bench.precision}"
        f"{'' if bench.compares_layouts else f' · layout {bench.layout}'}"
    )


def _draw_throughput(axis: Any, bench: Bench) -> None:
    """Draw strong scaling, with the ideal line of the fastest case on the fewest devices.

    Without strong scaling, draw weak scaling.
    """
    strong = bench.scaling(STRONG)
    cases = strong or bench.scaling(WEAK)
    counts = _counts(cases)
    first = max(spread(_rate(case))[0] for case in cases if case.devices == counts[0])
    ideal = [first * count / counts[0] for count in counts]
    axis.plot(counts, ideal, color=INK, linestyle="--", linewidth=1.2, label="ideal")
    _draw_modes(axis, cases, _rate, linestyle="-")
    unit = "tokens" if all(case.tokens_per_second for case in bench.cases) else "rows"
    axis.set_ylabel(f"{unit} per second")
    weak = f"weak: {cases[0].rows_per_device:,} rows per {bench.replica}"
    axis.set_title(f"strong: {bench.batch_size:,} rows per batch" if strong else weak, fontsize=10)
    ticker = require("matplotlib.ticker", "cli")
    axis.set_yscale("log")  # ideal scaling is a straight line
    low, high = axis.get_ylim()
    subs = (1, 2, 5) if high / low > 12 else (1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8)
    axis.yaxis.set_major_locator(ticker.LogLocator(10, subs=subs))
    axis.yaxis.set_major_formatter("{x:,.0f}" if high >= 10 else "{x:.2g}")
    axis.yaxis.set_minor_locator(ticker.NullLocator())


def _draw_efficiency(axis: Any, bench: Bench) -> None:
    """Draw strong scaling as solid lines and weak scaling as dashed lines."""
    axis.axhline(100, color=INK, linestyle=":", linewidth=1.2)
    for scaling, linestyle in ((STRONG, "-"), (WEAK, "--")):
        cases = [case for case in bench.scaling(scaling) if as_mode(case.mode).most_devices != 1]

        def percent(case: CaseResult, scaling: str = scaling) -> Iterable[float]:
            return (100 * value for value in case.efficiency[scaling])

        _draw_modes(axis, cases, percent, linestyle=linestyle, labelled=False)
        if cases:
            axis.plot([], [], color=INK, linestyle=linestyle, label=scaling)
    axis.set_ylabel("efficiency in %")
    top = max(110, axis.get_ylim()[1])
    axis.set_ylim(0, top)
    if any(is_noise(values) for case in bench.cases for values in case.efficiency.values()):
        axis.axhspan(100, top, color=INK, alpha=0.2, linewidth=0)
        axis.annotate(
            "above 100%: noise",
            (0.5, 100),
            xycoords=("axes fraction", "data"),
            xytext=(0, -4),
            textcoords="offset points",
            ha="center",
            va="top",
            fontsize=9,
        )
    weak, counts = bench.scaling(WEAK), _counts(bench.cases)
    rows = f"; weak: {weak[0].rows_per_device:,} rows per {bench.replica}" if weak else ""
    fewest = f"{counts[0]} {bench.scaled_over if counts[0] > 1 else bench.replica}"
    axis.set_title(f"relative to {fewest}{rows}", fontsize=10)


def _draw_modes(
    axis: Any,
    cases: Sequence[CaseResult],
    values: Callable[[CaseResult], Iterable[float]],
    *,
    linestyle: str,
    labelled: bool = True,
) -> None:
    """Draw a line per mode through the medians, with error bars between the quartiles."""
    modes = list(dict.fromkeys(case.mode for case in cases))
    span = max(2.0, *(case.devices / cases[0].devices for case in cases)) if cases else 1.0
    for place, mode in enumerate(modes):
        of_mode = [case for case in cases if case.mode == mode]
        aside = span ** (BESIDE * (place - (len(modes) - 1) / 2 + (linestyle == "--") / 2))
        middles, bars = _medians(map(values, of_mode))
        colour, marker = STYLES[list(MODES).index(mode) % len(STYLES)]
        axis.errorbar(
            [case.devices * aside for case in of_mode],
            middles,
            yerr=bars,
            color=colour,
            marker=marker,
            markersize=6,
            markerfacecolor=colour if linestyle == "-" else "none",
            linestyle=linestyle,
            linewidth=1.4,
            capsize=3,
            label=mode if labelled else None,
        )


def _draw_time(axis: Any, cases: Sequence[CaseResult], bench: Bench) -> None:
    middles, bars = _medians([[1e3 * each for each in case.seconds_per_step] for case in cases])
    places = range(len(cases))
    axis.barh(places, middles, xerr=bars, color=TIME, height=0.6, capsize=3, ecolor=INK)
    _write(axis, middles + bars[1], middles)
    axis.set_xlabel("milliseconds per step, median and quartiles")
    units = [bench.scaled_over if case.devices > 1 else bench.replica for case in cases]
    pairs = zip(cases, units, strict=True)
    axis.set_yticks(places, [f"{case.name}, {case.devices} {unit}" for case, unit in pairs])
    axis.invert_yaxis()


def _draw_memory(axis: Any, cases: Sequence[CaseResult]) -> None:
    state = np.asarray([each.layout.state_bytes_per_device if each.layout else 0 for each in cases])
    peak = np.asarray([case.peak_bytes_per_device or 0 for case in cases])
    state, ends = state / 2**20, np.maximum(peak, state) / 2**20
    if state.any():
        axis.barh(range(len(cases)), state, color=STATE, height=0.6, label="train state")
    axis.barh(
        range(len(cases)),
        ends - state,
        left=state,
        color=REST,
        height=0.6,
        label="step at its peak",
    )
    _write(axis, ends, ends)
    axis.set_xlabel("memory per device in MiB")


def _write(axis: Any, ends: np.ndarray, values: np.ndarray) -> None:
    """Write each bar's value next to its end, and make room for it."""
    for place, (end, value) in enumerate(zip(ends, values, strict=True)):
        text = f"{value:,.3g}" if value < 1e3 else f"{value:,.0f}"
        axis.annotate(
            text, (end, place), xytext=(5, 0), textcoords="offset points", va="center", fontsize=9
        )
    axis.set_xlim(0, 1.18 * max(ends) or 1.0)
    axis.locator_params(axis="x", nbins=5)
    axis.xaxis.set_major_formatter("{x:,g}")


def _medians(samples: Iterable[Iterable[float]]) -> tuple[np.ndarray, np.ndarray]:
    """Return the medians, and the distances of the quartiles below and above them."""
    middles, lows, highs = np.asarray([spread(list(values)) for values in samples]).T
    return middles, np.stack([middles - lows, highs - middles])


def _rate(case: CaseResult) -> Sequence[float]:
    return case.tokens_per_second or case.rows_per_second


def _counts(cases: Sequence[CaseResult]) -> list[int]:
    return sorted({case.devices for case in cases})
