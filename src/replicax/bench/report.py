"""Reports of a benchmark: text tables for a terminal, and Markdown."""

from collections.abc import Callable, Sequence

from replicax.bench.bench_result import Bench, CaseResult, LayoutFigures, by_mode
from replicax.bench.cases import STRONG, WEAK
from replicax.bench.numbers import around, is_noise, percent_around, spread
from replicax.text.blocks import GAP, Grid, Paragraph, ReportBlock, report_of
from replicax.text.wording import UNKNOWN, counted, duration, number_text, percent, size_text

Column = tuple[str, Callable[[CaseResult], str]]
"""A heading, possibly of several lines, and a function that formats a case."""
Section = tuple[str, list[list[str]]]
"""A title, and the rows of a table, headings first."""


@report_of.register
def _(bench: Bench) -> list[ReportBlock]:
    blocks: list[ReportBlock] = [Paragraph(text) for text in header(bench)]
    for title, rows in sections(bench):
        blocks += [GAP, Paragraph(title), Grid(rows)]
    return [*blocks, *map(Paragraph, footnotes(bench))]


def to_markdown(bench: Bench, pictures: Sequence[str] = ()) -> str:
    """Format the benchmark as GitHub Markdown, with pictures in the same folder."""
    parts = ["# Bench", "\n".join(f"- {text}" for text in header(bench))]
    parts += [f"![{name}]({name})" for name in pictures]
    for title, (heads, *rows) in sections(bench):
        name, _, explanation = title.partition(": ")
        parts += [f"## {name.capitalize()}", *filter(None, [explanation])]
        heads = [" ".join(head.replace("-\n", "").split()) for head in heads]
        lines = [heads, ["---", *["---:"] * (len(heads) - 1)], *rows]
        parts.append("\n".join(f"| {' | '.join(line)} |" for line in lines))
    return "\n\n".join([*parts, "\n".join(f"- {text}" for text in footnotes(bench))]) + "\n"


def header(bench: Bench) -> list[str]:
    """Describe the environment, the model and the measurement, one line each."""
    where = bench.environment
    packages = (f"{name} {where[name]}" for name in ("replicax", "jax", "jaxlib", "python"))
    micro = f" · {bench.accumulate} micro-batches" if bench.accumulate > 1 else ""
    reduction = "" if bench.reduction == "float32" else f" · reduction {bench.reduction}"
    return [
        f"{where['date']} · {bench.device_kind} devices · {where['processor']}, "
        f"{where['cores']} cores{f', one per {bench.replica}' if bench.pinned else ''}",
        " · ".join(packages),
        f"{bench.parameters:,} parameters, {size_text(bench.parameter_bytes)} · {bench.precision}"
        f"{'' if bench.compares_layouts else f' · layout {bench.layout}'}{reduction}",
        f"batch {bench.batch_size:,}{micro} · {counted(bench.rounds, 'round')} in "
        f"{duration(bench.seconds)}, median ± half the interquartile range",
    ]


def sections(bench: Bench) -> list[Section]:
    """Return the titles and rows of the tables, without columns that have no known value."""
    all_cases = by_mode(bench.cases)
    if bench.compares_layouts:
        title = f"layouts: {bench.batch_size:,} rows per batch"
        return [(title, _rows(_layout_columns(bench), all_cases))]
    speeds = [
        (_title(bench, scaling), _rows(_speed_columns(bench, scaling), cases))
        for scaling in (STRONG, WEAK)
        if (cases := bench.scaling(scaling))
    ]
    return [*speeds, ("each step", _rows(_resource_columns(bench), all_cases))]


def _rows(columns: Sequence[Column], cases: Sequence[CaseResult]) -> list[list[str]]:
    filled = [[head, *map(text, cases)] for head, text in columns]
    known = [column for column in filled if {*column[1:]} != {UNKNOWN}]
    return list(map(list, zip(*known, strict=True)))


def _title(bench: Bench, scaling: str) -> str:
    if len({case.devices for case in bench.cases}) == 1:
        return f"speed: {bench.batch_size:,} rows per batch"
    if scaling == STRONG:
        rows = f"{bench.batch_size:,} rows per batch"
        return f"strong scaling: {rows} on any number of {bench.scaled_over}"
    return f"weak scaling: {bench.scaling(WEAK)[0].rows_per_device:,} rows per {bench.replica}"


def _speed_columns(bench: Bench, scaling: str) -> list[Column]:
    return [
        ("mode", lambda case: case.mode),
        (bench.scaled_over, lambda case: f"{case.devices}"),
        ("batch", lambda case: number_text(case.global_batch)),
        *_rate_columns(bench),
        (
            "efficiency",
            lambda case: percent_around(case.efficiency[scaling]) + _star(case, scaling),
        ),
        ("wait", lambda case: percent(spread(case.input_wait_fraction)[0])),
    ]


def _star(case: CaseResult, scaling: str) -> str:
    return " *" if is_noise(case.efficiency[scaling]) else ""


def _rate_columns(bench: Bench) -> list[Column]:
    unit = "rows" if any(case.tokens_per_second is None for case in bench.cases) else "tokens"

    def rate(case: CaseResult) -> str:
        return number_text(spread(case.tokens_per_second or case.rows_per_second)[0])

    return [
        (f"{unit}/s", rate),
        ("ms/step", lambda case: around([1e3 * value for value in case.seconds_per_step])),
    ]


def _layout_columns(bench: Bench) -> list[Column]:
    alone = {case.mode for case in bench.cases if case.devices == 1}

    def speedup(case: CaseResult) -> str:
        if case.mode not in alone:
            return UNKNOWN
        speed = number_text(case.devices * spread(case.efficiency[STRONG])[0])
        return speed + _star(case, STRONG)

    return [
        ("layout", lambda case: case.name),
        ("de-\nvices", lambda case: f"{case.devices}"),
        *_rate_columns(bench),
        ("speed-\nup", speedup),
        ("state\nMiB", lambda case: _mebibytes(_figures(case).state_bytes_per_device)),
        ("peak\nMiB", lambda case: _mebibytes(case.peak_bytes_per_device)),
        ("\nsent", lambda case: size_text(case.sent_bytes)),
        ("bub-\nble", lambda case: percent(_figures(case).bubble)),
    ]


def _figures(case: CaseResult) -> LayoutFigures:
    assert case.layout is not None, "no layouts are compared"
    return case.layout


def _mebibytes(size_bytes: int | None) -> str:
    return UNKNOWN if size_bytes is None else number_text(size_bytes / 2**20)


def _resource_columns(bench: Bench) -> list[Column]:
    def gigaflops(case: CaseResult) -> str:
        return number_text(case.flops_per_second / 1e9) if case.flops_per_step else UNKNOWN

    return [
        ("mode", lambda case: case.mode),
        (bench.scaled_over, lambda case: f"{case.devices}"),
        ("batch", lambda case: number_text(case.global_batch)),
        ("peak\nMiB", lambda case: _mebibytes(case.peak_bytes_per_device)),
        ("seen\nMiB", lambda case: _mebibytes(case.measured_peak_bytes_per_device)),
        ("compile\ns", lambda case: number_text(case.trace_seconds + case.compile_seconds)),
        ("reduc-\ntions", lambda case: number_text(sum(e.count for e in case.collectives))),
        ("\nsent", lambda case: size_text(case.sent_bytes)),
        ("\nGFLOP/s", gigaflops),
        ("of\npeak", lambda case: percent(case.share_of_peak or None)),
        ("of a\nproduct", lambda case: percent(case.share_of_product or None)),
    ]


def footnotes(bench: Bench) -> list[str]:
    """Return explanations of the columns, and the notes of the benchmark."""
    lines = _layout_footnotes(bench) if bench.compares_layouts else _mode_footnotes(bench)
    if any(_star(case, scaling) for case in bench.cases for scaling in case.efficiency):
        lines.append(
            "*: an efficiency above 100% is noise, unless a cache holds one device's share of the "
            "batch and not all of it; measure again on an idle machine"
        )
    return [*lines, *(f"note: {note}" for note in bench.notes)]


def _mode_footnotes(bench: Bench) -> list[str]:
    lines = ["wait: share of the time spent waiting for a batch; peak: memory per device"]
    most = max(bench.cases, key=lambda case: case.least_sent_bytes or 0)
    if most.least_sent_bytes:
        lines.append(
            f"sent: bytes per {bench.replica} and step; reducing one gradient on {most.devices} "
            f"{bench.scaled_over} needs at least {size_text(most.least_sent_bytes)}"
        )
    if any(case.share_of_product for case in bench.cases):
        rates = {case.devices: case.product_flops_per_second for case in bench.cases}
        known = {count: rate for count, rate in rates.items() if rate is not None}
        same = len(set(known.values())) == 1
        texts = (
            f"{number_text(rate / 1e9)}{'' if same else f' on {count}'}"
            for count, rate in known.items()
        )
        lines.append(
            "product: rate of a 1024 x 1024 matrix product on the same cores, "
            f"{', '.join(dict.fromkeys(texts))} GFLOP/s, not the hardware peak"
        )
    return lines


def _layout_footnotes(bench: Bench) -> list[str]:
    lines = [
        "speed-up: over one device in the same mode; state, peak: memory per device; sent: bytes "
        "per device and step"
    ]
    if any(_figures(case).bubble is not None for case in bench.cases):
        lines.append(
            "bubble: share of a step in which a stage is idle, (S - 1) / (M + S - 1) for S stages "
            f"and M = {bench.accumulate} micro-batches, from accumulate"
        )
    return lines
