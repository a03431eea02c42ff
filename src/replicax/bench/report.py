"""A bench as text: two tables that fit a terminal, and Markdown."""

import math
import textwrap
from collections.abc import Callable, Sequence

from replicax.bench.cases import STRONG, WEAK
from replicax.bench.result import Bench, CaseResult, by_mode
from replicax.bench.timing import spread
from replicax.wording import duration

WIDTH = 80
UNKNOWN = "-"

Column = tuple[str, Callable[[CaseResult], str]]
"""A heading, whose lines are parted by a line break, and the text of a case below it."""


def table(bench: Bench) -> list[str]:
    """The whole bench in lines of at most 80 columns: what it is of, speed, resources, notes."""
    lines = [line for text in header(bench) for line in _wrapped(text)]
    for scaling in scalings(bench):
        lines += ["", *_wrapped(title(bench, scaling))]
        lines += _aligned(speed_columns(bench, scaling), bench.scaling(scaling))
    lines += ["", "each step", *_aligned(resource_columns(bench), by_mode(bench.cases))]
    lines += [line for text in footnotes(bench) for line in _wrapped(text)]
    return lines


def to_markdown(bench: Bench, pictures: Sequence[str] = ()) -> str:
    """The same as GitHub's Markdown.

    Args:
        bench: what was measured.
        pictures: file names of plots to show, beside the text.
    """
    parts = ["# Bench", "\n".join(f"- {text}" for text in header(bench))]
    parts += [f"![{name}]({name})" for name in pictures]
    for scaling in scalings(bench):
        name, _, explanation = title(bench, scaling).partition(": ")
        parts += [f"## {name.capitalize()}", explanation] if explanation else [f"## {name}"]
        parts.append(_piped(speed_columns(bench, scaling), bench.scaling(scaling)))
    parts += ["## Each step", _piped(resource_columns(bench), by_mode(bench.cases))]
    parts.append("\n".join(f"- {text}" for text in footnotes(bench)))
    return "\n\n".join(part for part in parts if part) + "\n"


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
        f"{bench.parameters:,} parameters, {traffic(bench.parameter_bytes)} · {bench.precision} · "
        f"layout {bench.layout}{reduction}",
        f"batch {bench.batch_size:,}{micro} · {bench.rounds} round{plural} in "
        f"{duration(bench.seconds)}, median ± half of what the quartiles are apart",
    ]


def scalings(bench: Bench) -> list[str]:
    """Those that were measured."""
    return [name for name in (STRONG, WEAK) if bench.scaling(name)]


def title(bench: Bench, scaling: str) -> str:
    """What a table of speeds is of."""
    if len({case.devices for case in bench.cases}) == 1:
        return f"speed: {bench.batch_size:,} rows a batch"
    if scaling == STRONG:
        rows = f"{bench.batch_size:,} rows a batch"
        return f"strong scaling: {rows} on any number of {bench.scaled_over}"
    return f"weak scaling: {bench.scaling(WEAK)[0].rows_per_device:,} rows a {bench.replica}"


def speed_columns(bench: Bench, scaling: str) -> list[Column]:
    """How fast the cases of one scaling are."""
    unit = "rows" if any(case.tokens_per_second is None for case in bench.cases) else "tokens"

    def rate(case: CaseResult) -> str:
        return short(spread(case.tokens_per_second or case.rows_per_second)[0])

    return [
        ("mode", lambda case: case.mode),
        (bench.scaled_over, lambda case: f"{case.devices}"),
        ("batch", lambda case: short(case.global_batch)),
        (f"{unit}/s", rate),
        ("ms/step", lambda case: around([1e3 * value for value in case.seconds_per_step])),
        ("efficiency", lambda case: percent_around(case.efficiency[scaling])),
        ("wait", lambda case: percent(spread(case.input_wait_fraction)[0])),
    ]


def resource_columns(bench: Bench) -> list[Column]:
    """What the steps take, whatever their speed."""
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
    """What the columns mean where it is not plain, and the notes of the bench."""
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


def digits(value: float) -> str:
    """Three significant digits, without an exponent where the value is below a million."""
    if value >= 1e6:
        return short(value)
    return f"{value:,.{_decimals(value)}f}"


def short(value: float) -> str:
    """A count in at most 7 characters."""
    if value < 999_999.5:
        return f"{value:,.0f}" if value >= 99.95 or value == int(value) else digits(value)
    for unit, size in (("M", 1e6), ("G", 1e9), ("T", 1e12)):
        if value < 999.95 * size:
            return f"{value / size:.{3 if value < 9.9995 * size else 1}f}{unit}"
    return f"{value:.0e}"


def hundredths(seconds: float) -> str:
    """Seconds with two decimals, as long as these matter."""
    return f"{seconds:.2f}" if seconds < 100 else short(seconds)


def around(values: Sequence[float]) -> str:
    """The median, and half of what the quartiles are apart, in the median's digits."""
    middle, low, high = spread(values)
    half = (high - low) / 2
    if middle >= 99_999.5:
        return f"{short(middle)} ± {short(half)}"
    decimals = _decimals(middle)
    return f"{middle:,.{decimals}f} ± {half:,.{decimals}f}"


def percent(value: float | None) -> str:
    """A share."""
    return UNKNOWN if value is None else f"{value:.0%}"


def percent_around(values: Sequence[float]) -> str:
    """The median share, and half of what the quartiles are apart."""
    middle, low, high = spread(values)
    # The fewest devices are compared with themselves.
    return percent(middle) if low == high else f"{middle:.0%} ± {100 * (high - low) / 2:.0f}"


def mebibytes(count: int | None) -> str:
    """Bytes of memory in MiB."""
    return UNKNOWN if count is None else digits(count / 2**20)


def traffic(count: int) -> str:
    """Bytes in powers of ten, as networks have them."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= 0.9995 * size:
            return f"{digits(count / size)} {unit}"
    return f"{count} B"


def _decimals(value: float) -> int:
    """Decimals that give three significant digits, at most 4."""
    if value <= 0:
        return 0
    return min(max(2 - math.floor(math.log10(value)), 0), 4)


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, subsequent_indent="  ")


def _cells(columns: Sequence[Column], cases: Sequence[CaseResult]) -> list[list[str]]:
    return [[text(case) for _, text in columns] for case in cases]


def _aligned(columns: Sequence[Column], cases: Sequence[CaseResult]) -> list[str]:
    """Lines: the first column to the left, the others to the right."""
    heads = [head.split("\n") for head, _ in columns]
    depth = max(map(len, heads))
    heads = [[""] * (depth - len(head)) + head for head in heads]
    rows = [*map(list, zip(*heads, strict=True)), *_cells(columns, cases)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    gap = "  " if sum(widths) + 2 * (len(widths) - 1) <= WIDTH else " "
    return [
        gap.join(
            cell.rjust(width) if place else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def _piped(columns: Sequence[Column], cases: Sequence[CaseResult]) -> str:
    heads = [" ".join(head.replace("-\n", "").split()) for head, _ in columns]
    lines = [heads, ["---", *["---:"] * (len(columns) - 1)], *_cells(columns, cases)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
