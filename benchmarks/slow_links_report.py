"""Methods over slow links as a table of 80 columns, a plot, and files."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
from slow_links_bench import LinkBench, LinkCase
from slow_links_methods import LinkMethod

from replicax.bench.numbers import percent_around, spread
from replicax.text.plot_style import INK, PALETTE, picture
from replicax.text.table import aligned, labelled
from replicax.text.wording import counted, duration, percent, size_text, time_text

FORECAST = PALETTE[4]
_HEADS = ("method", "bytes\na step", "of\nformula", "utili-\nzation")
_COMPARED = ("fore-\ncast", "points\napart", "with\nown", "points\napart")


def link_table(bench: LinkBench) -> list[str]:
    """Return the measurements as lines of at most 80 columns."""
    where = bench.environment
    network = f"{bench.network} for each island, by {bench.shaped_by}"
    if bench.why_relay:
        network += f" ({bench.why_relay})"
    about = (
        f"{where['date']} · {where['processor']}, {where['cores']} cores · jax {where['jax']} · "
        f"{bench.parameters:,} parameters · {counted(bench.repetitions, 'repetition')} in "
        f"{duration(bench.seconds)}, median ± half the interquartile range"
    )
    rows = [[*_HEADS, *_COMPARED], *(_row(case) for case in bench.cases)]
    lines = [*labelled("bench", about), *labelled("links", network)]
    step = float(np.median(bench.alone_step_seconds))
    text = f"{counted(bench.islands, 'island')}, a step without an exchange: {time_text(step)}"
    lines += labelled("alone", f"{text}, {time_text(step / bench.parameters)} a parameter")
    own = (
        "with own: the forecast of plan and, measured on this machine, what an island does with "
        "what it sends and receives: encode, decode, and apply it"
    )
    notes = [line for note in (own, *bench.notes) for line in labelled("note", note)]
    return [*lines, "", *aligned(rows, left=2), *notes]


def _row(case: LinkCase) -> list[str]:
    measured = float(np.median(case.utilization))
    return [
        method_text(case.method),
        size_text(case.bytes_per_step),
        f"{case.bytes_per_step / case.formula_bytes_per_step:.3f}",
        percent_around(case.utilization),
        percent(case.forecast),
        f"{100 * (measured - case.forecast):+.1f}",
        percent(case.forecast_with_own),
        f"{100 * (measured - case.forecast_with_own):+.1f}",
    ]


def method_text(method: LinkMethod) -> str:
    """Return the name of a method, and how often it exchanges."""
    return method.name if method.schedule.every == 1 else f"{method.name}, {method.schedule.every}"


def link_json(bench: LinkBench) -> dict[str, Any]:
    """Return all repetitions, and the medians with their quartiles."""

    def of(case: LinkCase) -> dict[str, Any]:
        found = dataclasses.asdict(case)
        middle, low, high = spread(case.utilization)
        return {
            **found,
            "median_and_quartiles": [middle, low, high],
            "points_apart": 100 * (middle - case.forecast),
            "points_apart_with_own": 100 * (middle - case.forecast_with_own),
        }

    return {**dataclasses.asdict(bench), "cases": [of(case) for case in bench.cases]}


def draw_links(bench: LinkBench, path: Path) -> None:
    """Plot the utilization of each method as bars, with the forecast as a line across each."""
    at = range(len(bench.cases))
    middles, lows, highs = 100 * np.asarray([spread(case.utilization) for case in bench.cases]).T
    with picture(path, 9.0, 4.2) as figure:
        axis = figure.subplots()
        bars = np.stack([middles - lows, highs - middles])
        axis.bar(at, middles, 0.7, yerr=bars, capsize=3, ecolor=INK, color=PALETTE[0])
        lefts, rights = [each - 0.35 for each in at], [each + 0.35 for each in at]
        forecasts = [100 * case.forecast for case in bench.cases]
        axis.hlines(forecasts, lefts, rights, color=FORECAST, linewidth=2.5, label="forecast")
        axis.axhline(100, color=INK, linestyle=":", linewidth=1.2)
        axis.set_xticks(at, [case.method.name for case in bench.cases])
        axis.set_ylim(0, 110)
        axis.set_ylabel("utilization in %")
        islands = counted(bench.islands, "island")
        about = f"{bench.parameters:,} parameters · {islands} · {bench.network}"
        axis.set_title(f"{about} · {bench.shaped_by}", fontsize=10)
        axis.legend(loc="upper left")
