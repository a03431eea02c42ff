"""A bench as text: two tables that fit a terminal, and Markdown."""

import textwrap
from collections.abc import Callable, Sequence

from replicax.bench.bench_result import Bench, CaseResult, LayoutFigures, by_mode
from replicax.bench.cases import STRONG, WEAK
from replicax.bench.numbers import (
    UNKNOWN,
    around,
    digits,
    hundredths,
    mebibytes,
    percent,
    percent_around,
    short,
    spread,
    traffic,
)
from replicax.wording import duration

WIDTH = 80

Column = tuple[str, Callable[[CaseResult], str]]
"""A heading, whose lines are parted by a line break, and the text of a case below it."""


def table(bench: Bench) -> list[str]:
    """The whole bench in lines of at most 80 columns: what it is of, speed, resources, notes."""
    lines = [line for text in header(bench) for line in _wrapped(text)]
    for heading, columns, cases in tables(bench):
        lines += ["", *_wrapped(heading), *_aligned(columns, cases)]
    lines += [line for text in footnotes(bench) for line in _wrapped(text)]
    return lines


def header(bench: Bench) -> list[str]:
    """Where and of what this was measured, a line each."""
    where, plural = bench.environment, "s" if bench.rounds > 1 else ""
    packages = (f"{name} {where[name]}" for name in ("replicax", "jax", "jaxlib", "python"))
    micro = f" · {bench.accumulate} micro-batches" if bench.accumulate > 1 else ""
    reduction = "" if bench.reduction == "float32" else f" · reduction {bench.reduction}"
    return [
        f"{where['date']} · {bench.device_kind} devices · {where['processor']}, "
        f"{where['cores']} cores{f', one a {bench.replica}' if bench.pinned else ''}",
        " · ".join(packages),
        f"{bench.parameters:,} parameters, {traffic(bench.parameter_bytes)} · {bench.precision}"
        f"{'' if bench.compares_layouts else f' · layout {bench.layout}'}{reduction}",
        f"batch {bench.batch_size:,}{micro} · {bench.rounds} round{plural} in "
        f"{duration(bench.seconds)}, median ± half of what the quartiles are apart",
    ]


def scalings(bench: Bench) -> list[str]:
    """Return the scalings that were measured."""
    return [name for name in (STRONG, WEAK) if bench.scaling(name)]


def tables(bench: Bench) -> list[tuple[str, list[Column], Sequence[CaseResult]]]:
    """The headings, columns and cases of the tables."""
    if bench.compares_layouts:
        heading = f"layouts: {bench.batch_size:,} rows a batch"
        return [(heading, layout_columns(bench), by_mode(bench.cases))]
    return [
        *(
            (title(bench, scaling), speed_columns(bench, scaling), bench.scaling(scaling))
            for scaling in scalings(bench)
        ),
        ("each step", resource_columns(bench), by_mode(bench.cases)),
    ]


def title(bench: Bench, scaling: str) -> str:
    """Return the title of a table of speeds."""
    if len({case.devices for case in bench.cases}) == 1:
        return f"speed: {bench.batch_size:,} rows a batch"
    if scaling == STRONG:
        rows = f"{bench.batch_size:,} rows a batch"
        return f"strong scaling: {rows} on any number of {bench.scaled_over}"
    return f"weak scaling: {bench.scaling(WEAK)[0].rows_per_device:,} rows a {bench.replica}"


def speed_columns(bench: Bench, scaling: str) -> list[Column]:
    """How fast the cases of one scaling are."""
    return [
        ("mode", lambda case: case.mode),
        (bench.scaled_over, lambda case: f"{case.devices}"),
        ("batch", lambda case: short(case.global_batch)),
        *_rate_columns(bench),
        ("efficiency", lambda case: percent_around(case.efficiency[scaling])),
        ("wait", lambda case: percent(spread(case.input_wait_fraction)[0])),
    ]


def _rate_columns(bench: Bench) -> list[Column]:
    unit = "rows" if any(case.tokens_per_second is None for case in bench.cases) else "tokens"

    def rate(case: CaseResult) -> str:
        return short(spread(case.tokens_per_second or case.rows_per_second)[0])

    return [
        (f"{unit}/s", rate),
        ("ms/step", lambda case: around([1e3 * value for value in case.seconds_per_step])),
    ]


def layout_columns(bench: Bench) -> list[Column]:
    """Columns of a table of layouts."""
    columns: list[Column] = [
        ("layout", lambda case: case.name),
        ("de-\nvices", lambda case: f"{case.devices}"),
        *_rate_columns(bench),
        ("state\nMiB", lambda case: mebibytes(_figures(case).state_bytes_per_device)),
        ("peak\nMiB", lambda case: mebibytes(case.peak_bytes_per_device)),
        ("\nsent", lambda case: traffic(round(case.sent_bytes))),
    ]
    alone = {case.mode for case in bench.cases if case.devices == 1}
    if alone:
        columns.insert(
            4, ("speed-\nup", lambda case: _speedup(case) if case.mode in alone else UNKNOWN)
        )
    if _has_stages(bench):
        columns.append(("bub-\nble", lambda case: percent(_figures(case).bubble)))
    return columns


def _figures(case: CaseResult) -> LayoutFigures:
    assert case.layout is not None, "layouts are compared"
    return case.layout


def _has_stages(bench: Bench) -> bool:
    return any(_figures(case).bubble is not None for case in bench.cases)


def _speedup(case: CaseResult) -> str:
    """Over one device, in the median round."""
    return digits(case.devices * spread(case.efficiency[STRONG])[0])


def resource_columns(bench: Bench) -> list[Column]:
    """Return the columns of what steps take, whatever their speed."""
    columns: list[Column] = [
        ("mode", lambda case: case.mode),
        (bench.scaled_over, lambda case: f"{case.devices}"),
        ("batch", lambda case: short(case.global_batch)),
        ("peak\nMiB", lambda case: mebibytes(case.peak_bytes_per_device)),
        ("compile\ns", lambda case: hundredths(case.trace_seconds + case.compile_seconds)),
        ("reduc-\ntions", lambda case: short(case.collective_count)),
        ("\nsent", lambda case: traffic(round(case.sent_bytes))),
    ]
    if any(case.measured_peak_bytes_per_device is not None for case in bench.cases):
        measured = ("seen\nMiB", lambda case: mebibytes(case.measured_peak_bytes_per_device))
        columns.insert(4, measured)
    if any(case.flops_per_step for case in bench.cases):
        columns.append(("\nGFLOP/s", lambda case: short(case.flops_per_second / 1e9)))
    if any(case.share_of_peak is not None for case in bench.cases):
        columns.append(("of\npeak", lambda case: percent(case.share_of_peak)))
    elif any(case.share_of_product for case in bench.cases):
        columns.append(("of a\nproduct", lambda case: percent(case.share_of_product)))
    return columns


def footnotes(bench: Bench) -> list[str]:
    """Return what columns mean where it is not plain, and the notes of the bench."""
    if bench.compares_layouts:
        return [*_layout_footnotes(bench), *(f"note: {note}" for note in bench.notes)]
    lines = ["wait: share of the time spent waiting for a batch; peak: memory of a device"]
    most = max(bench.cases, key=lambda case: case.least_sent_bytes or 0)
    if most.least_sent_bytes:
        lines.append(
            f"sent: bytes of a {bench.replica} in a step; to reduce one gradient on {most.devices} "
            f"{bench.scaled_over}, {traffic(round(most.least_sent_bytes))} at least"
        )
    rates = {case.devices: case.product_flops_per_second for case in bench.cases}
    if any(case.share_of_product for case in bench.cases):
        known = {count: rate for count, rate in rates.items() if rate is not None}
        same = len(set(known.values())) == 1
        each = (
            f"{short(rate / 1e9)}{'' if same else f' on {count}'}" for count, rate in known.items()
        )
        listed = ", ".join(dict.fromkeys(each))
        lines.append(
            "product: the rate of a 1024 x 1024 matrix product on the same cores, "
            f"{listed} GFLOP/s: not the hardware's peak"
        )
    return [*lines, *(f"note: {note}" for note in bench.notes)]


def _layout_footnotes(bench: Bench) -> list[str]:
    lines = [
        "speed-up: over one device in the same mode; state, peak: memory of a device; sent: bytes "
        "of a device in a step"
    ]
    if _has_stages(bench):
        lines.append(
            "bubble: share of a step that a stage is idle, (S - 1) / (M + S - 1) of S stages and "
            f"M = {bench.accumulate} micro-batches, from accumulate"
        )
    return lines


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, subsequent_indent="  ")


def cells(columns: Sequence[Column], cases: Sequence[CaseResult]) -> list[list[str]]:
    """The text of a table's cells, case by case."""
    return [[text(case) for _, text in columns] for case in cases]


def _aligned(columns: Sequence[Column], cases: Sequence[CaseResult]) -> list[str]:
    """Lines: the first column to the left, the others to the right."""
    heads = [head.split("\n") for head, _ in columns]
    depth = max(map(len, heads))
    heads = [[""] * (depth - len(head)) + head for head in heads]
    rows = [*map(list, zip(*heads, strict=True)), *cells(columns, cases)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    gap = "  " if sum(widths) + 2 * (len(widths) - 1) <= WIDTH else " "
    return [
        gap.join(
            cell.rjust(width) if place else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
