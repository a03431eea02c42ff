"""A plan as pictures: memory by rows of a device, and efficiency by device count."""

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from replicax.errors import require
from replicax.plan.cells import counted, short
from replicax.plan.forecast import ScalingPoint
from replicax.plan.need import Need
from replicax.plan.result import Plan
from replicax.wording import size_text

# Okabe and Ito's colours, told apart with any kind of colour vision.
FIXED, TEMPORARY, WHOLE, CAPACITY = "#0072B2", "#E69F00", "#56B4E9", "#D55E00"
WEAK, STRONG, TARGET = "#0072B2", "#D55E00", "#7F7F7F"
_MOST_BARS = 14
_HIGHEST = 2.0
"""Times the capacity: a bar goes beyond the picture where it is higher, and its label stays."""
_TITLE_WIDTH = 92
_LINE = 0.05
"""Of the height, for a line of a label."""
_UNITS = (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3))


def draw_memory(plan: Plan, path: Path) -> None:
    """Draw what each number of rows takes of a device, against what a device has.

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    figure_module = require("matplotlib.figure", "cli")
    figure = figure_module.Figure(figsize=(8.0, 4.6), layout="constrained")
    axis = figure.subplots()
    needs, capacity = shown_sizes(plan), plan.target.chip.usable_bytes
    highest: float = max(need.bytes for need in needs)
    if capacity is not None:
        highest = max(capacity, min(highest, _HIGHEST * capacity))
    unit, size = next(((name, size) for name, size in _UNITS if highest >= size), ("B", 1.0))
    _draw_bars(axis, needs, size)
    top = 1.16 * highest / size
    axis.set_ylim(0, top)
    if capacity is not None:
        label = f"{size_text(capacity)}: what a device can hold"
        axis.axhline(capacity / size, color=CAPACITY, linestyle="--", linewidth=1.2, label=label)
    for place, need in enumerate(needs):
        text = _bar_label(plan, need)
        height = _label_height(need.bytes / size, text, top, capacity and capacity / size)
        _label_bar(axis, place, height, text)
    axis.set_xticks(range(len(needs)), [short(need.rows) for need in needs])
    axis.set_xlim(-0.7, max(len(needs), 3) - 0.3)
    axis.set_xlabel("rows of a device")
    axis.set_ylabel(f"memory of a device in {unit}")
    _dress(figure, axis, plan)
    figure.savefig(path, dpi=150)


def shown_sizes(plan: Plan) -> list[Need]:
    """What has a bar, by rows: the batch asked for, and those next to the largest that fits."""
    by_rows = {need.rows: need for need in (*plan.sizes, plan.asked)}
    border = plan.largest or plan.too_large or plan.asked
    kept = sorted(by_rows, key=lambda rows: (rows != plan.asked.rows, _apart(rows, border.rows)))
    return [by_rows[rows] for rows in sorted(kept[:_MOST_BARS])]


def _apart(rows: int, border: int) -> float:
    return max(rows, border) / max(1, min(rows, border))


def _draw_bars(axis: Any, needs: Sequence[Need], size: float) -> None:
    """Stacked where the compiler tells the parts; hatched where it does not fit."""
    labelled = set()
    for place, need in enumerate(needs):
        parts = [(need.bytes, WHOLE, "all, at least" if need.compiled else "all, by formula")]
        if need.temporaries is not None:
            fixed = need.bytes - need.temporaries
            parts = [
                (fixed, FIXED, "state and batch"),
                (need.temporaries, TEMPORARY, "temporaries"),
            ]
        below = 0.0
        for part, colour, name in parts:
            axis.bar(
                place,
                part / size,
                bottom=below,
                width=0.7,
                color=colour if need.fits else "white",
                edgecolor="white" if need.fits else colour,
                linewidth=0 if need.fits else 1.0,
                hatch=None if need.fits else "///",
                label=name if need.fits and name not in labelled else None,
            )
            labelled |= {name} if need.fits else set()
            below += part / size
    beyond = [need for need in needs if not need.fits]
    if beyond:
        least = ", takes at least" if any(need.is_least for need in beyond) else ""
        axis.bar(
            [0], [0], color="white", edgecolor=TARGET, hatch="///", label=f"does not fit{least}"
        )


def _bar_label(plan: Plan, need: Need) -> str:
    words = []
    if need.rows == plan.asked.rows:
        words.append("asked")
    if plan.largest is not None and need.rows == plan.largest.rows:
        words.append("largest")
    return "\n".join([*words, size_text(need.bytes)])


def _label_height(height: float, text: str, top: float, capacity: float | None) -> float:
    """Where a label begins: on its bar, but not across the capacity nor beyond the picture."""
    tall = _LINE * (text.count("\n") + 1) * top
    if capacity is not None and height <= capacity < height + tall:
        height = capacity
    return min(height, top - tall)


def _label_bar(axis: Any, place: int, height: float, text: str) -> None:
    axis.annotate(
        text,
        (place, height),
        xytext=(0, 3),
        textcoords="offset points",
        ha="center",
        va="bottom",
        fontsize=8,
        bbox={"facecolor": "white", "alpha": 0.8, "linewidth": 0, "pad": 0.5},
        zorder=3,
    )


def draw_scaling(plan: Plan, path: Path) -> None:
    """Draw the efficiency on 1 to 10⁵ devices: weak scaling solid, strong scaling dashed.

    Raises:
        MissingDependencyError: matplotlib is not installed.
        ValueError: the plan has no scaling.
    """
    figure_module = require("matplotlib.figure", "cli")
    if plan.scaling is None or plan.speed is None:
        raise ValueError("a plan without scaling; draw it where `plan.scaling` is not None")
    found, rows, devices = plan.scaling, plan.speed.rows, plan.target.devices
    figure = figure_module.Figure(figsize=(8.0, 4.6), layout="constrained")
    axis = figure.subplots()
    axis.axvline(devices, color=TARGET, linestyle=":", linewidth=1.2)
    in_all = counted(rows * devices, "row")
    _draw_curve(axis, found.weak, WEAK, "-", f"weak: {counted(rows, 'row')} a device")
    _draw_curve(axis, found.strong, STRONG, "--", f"strong: {in_all} in all")
    _mark_pays(axis, found.weak, found.weak_pays, WEAK)
    _mark_pays(axis, found.strong, found.strong_pays, STRONG)
    axis.plot([], [], "o", color="#404040", markersize=8, label="more stop paying")
    axis.set_xscale("log")
    last = max(point.devices for point in (*found.weak, *found.strong))
    axis.set_xlim(0.8, max(last, devices, 2) * 1.25)
    ticks = [10**power for power in range(6) if 10**power <= max(last, 10)]
    axis.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    axis.set_ylim(0, 108)
    axis.set_xlabel("devices")
    axis.set_ylabel("efficiency in %")
    _name_target(axis, devices, plan.target.text)
    _dress(figure, axis, plan)
    figure.savefig(path, dpi=150)


def _draw_curve(
    axis: Any, points: Sequence[ScalingPoint], colour: str, linestyle: str, label: str
) -> None:
    axis.plot(
        [point.devices for point in points],
        [100 * point.efficiency for point in points],
        color=colour,
        linestyle=linestyle,
        marker=".",
        linewidth=1.6,
        label=label,
    )


def _mark_pays(axis: Any, points: Sequence[ScalingPoint], devices: int, colour: str) -> None:
    """A large dot where twice as many devices are no longer worth it; none at a curve's end."""
    here = [point for point in points if point.devices == devices]
    if not here or devices == points[-1].devices:
        return
    height = 100 * here[0].efficiency
    axis.plot([devices], [height], marker="o", color=colour, markersize=8, linestyle="none")
    axis.annotate(
        short(devices),
        (devices, height),
        xytext=(6, 6),
        textcoords="offset points",
        fontsize=9,
        color=colour,
    )


def _name_target(axis: Any, devices: int, text: str) -> None:
    low, high = axis.get_xlim()
    right = devices**2 > low * high
    axis.annotate(
        text,
        (devices, 0.0),
        xytext=(-4 if right else 4, 4),
        textcoords="offset points",
        ha="right" if right else "left",
        fontsize=9,
        color="#404040",
        parse_math=False,
    )


def _dress(figure: Any, axis: Any, plan: Plan) -> None:
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(alpha=0.25, axis="y")
    axis.set_axisbelow(True)
    figure.suptitle(_title(plan), fontsize=10, parse_math=False)
    # Beside the axes: whatever is drawn, it hides nothing.
    figure.legend(frameon=False, loc="outside lower center", ncols=4, fontsize=9)


def _title(plan: Plan) -> str:
    about = plan.about
    parts = [
        about.get("name"),
        "parameters" in about and f"{short(about['parameters'])} parameters",
        plan.target.text,
        about.get("precision"),
        f"layout {about['layout']}" if "layout" in about else None,
    ]
    how = "" if plan.asked.compiled else " · by formula"
    text = " · ".join(str(part) for part in parts if part) + how
    return "\n".join(textwrap.wrap(text, _TITLE_WIDTH, max_lines=2, placeholder=" ..."))
