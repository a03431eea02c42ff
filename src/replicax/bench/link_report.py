"""Methods over slow links as a table of 80 columns, a plot, and files."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np

from replicax.bench.link_bench import LinkBench, LinkCase
from replicax.bench.link_methods import LinkMethod
from replicax.bench.numbers import percent_around, spread
from replicax.errors import MissingDependencyError
from replicax.text.plot_style import INK, PALETTE, picture
from replicax.text.table import aligned, labelled
from replicax.text.wording import counted, duration, percent, size_text, time_text

PICTURE = "slow_links.png"
FORECAST = PALETTE[4]
_HEADS = ("islands", "method", "bytes\na step", "of\nformula", "utili-\nzation")
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
    for islands, seconds in bench.alone_step_seconds.items():
        step = float(np.median(seconds))
        each = time_text(step / bench.parameters)
        text = f"{counted(islands, 'island')}, a step without an exchange: {time_text(step)}"
        text += f", {each} a parameter"
        lines += labelled("alone", text)
    own = (
        "with own: the forecast of plan and, measured on this machine, what an island does with "
        "what it sends and receives: encode, decode, and apply it"
    )
    notes = [line for note in (own, *bench.notes) for line in labelled("note", note)]
    return [*lines, "", *aligned(rows, left=2), *notes]


def _row(case: LinkCase) -> list[str]:
    measured = float(np.median(case.utilization))
    return [
        str(case.islands),
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
    return method.name if method.every == 1 else f"{method.name}, {method.every}"


def write_link_bench(bench: LinkBench, folder: Path) -> list[Path]:
    """Write `bench.json` and, with matplotlib, `slow_links.png`; return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / "bench.json", folder / PICTURE]
    paths[0].write_text(json.dumps(link_json(bench), indent=2) + "\n", encoding="utf-8")
    try:
        draw_links(bench, paths[1])
    except MissingDependencyError:
        del paths[1]
    return paths


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
    counts = sorted(bench.alone_step_seconds)
    width, names = 0.8 / len(counts), list(dict.fromkeys(c.method.name for c in bench.cases))
    with picture(path, 9.0, 4.2) as figure:
        axis = figure.subplots()
        for place, count in enumerate(counts):
            own = [case for case in bench.cases if case.islands == count]
            aside = (place - (len(counts) - 1) / 2) * width
            at = [names.index(case.method.name) + aside for case in own]
            middles, lows, highs = 100 * np.asarray([spread(case.utilization) for case in own]).T
            bars = np.stack([middles - lows, highs - middles])
            axis.bar(
                at,
                middles,
                0.9 * width,
                yerr=bars,
                capsize=3,
                ecolor=INK,
                color=PALETTE[place % len(PALETTE)],
                label=counted(count, "island"),
            )
            forecasts, half = [100 * case.forecast for case in own], 0.45 * width
            lefts, rights = [each - half for each in at], [each + half for each in at]
            label = None if place else "forecast"
            axis.hlines(forecasts, lefts, rights, color=FORECAST, linewidth=2.5, label=label)
        axis.axhline(100, color=INK, linestyle=":", linewidth=1.2)
        axis.set_xticks(range(len(names)), names)
        axis.set_ylim(0, 110)
        axis.set_ylabel("utilization in %")
        axis.set_title(
            f"{bench.parameters:,} parameters · {bench.network} · {bench.shaped_by}", fontsize=10
        )
        axis.legend(loc="upper left")
