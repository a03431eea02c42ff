"""A bench as files."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from replicax.analysis.compiled import Collectives
from replicax.bench.bench_result import Bench, CaseResult
from replicax.bench.numbers import (
    spread,
)
from replicax.bench.plots import draw_layouts, draw_scaling
from replicax.bench.report import Column, cells, footnotes, header, tables
from replicax.errors import MissingDependencyError


def write_bench(bench: Bench, folder: str | Path, *, pictures: Sequence[str] = ()) -> list[Path]:
    """Write `bench.json`, `bench.md` and `scaling.png` or `layouts.png`; returns their paths.

    Without matplotlib there is no picture, and `bench.md` says so.

    Args:
        bench: what was measured.
        folder: made where it is not there yet.
        pictures: file names of others in the folder, for `bench.md` to show.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    draw, picture = draw_scaling, "scaling.png"
    if bench.compares_layouts:
        draw, picture = draw_layouts, "layouts.png"
    paths = [folder / "bench.json", folder / "bench.md", folder / picture]
    paths[0].write_text(json.dumps(to_json(bench), indent=2) + "\n", encoding="utf-8")
    try:
        draw(bench, paths[2])
        text = to_markdown(bench, [paths[2].name, *pictures])
    except MissingDependencyError as error:
        del paths[2]
        text = f"{to_markdown(bench, pictures)}- no {picture}: {error}\n"
    paths[1].write_text(text, encoding="utf-8")
    return paths


def to_json(bench: Bench) -> dict[str, Any]:
    """Everything that was measured, all rounds of it, and the medians with their quartiles."""
    plain = dataclasses.asdict(bench)
    plain["notes"] = list(bench.notes)
    plain["cases"] = [_case_to_json(case) for case in bench.cases]
    return plain


def _case_to_json(case: CaseResult) -> dict[str, Any]:
    rounds: dict[str, Any] = {
        "seconds_per_step": case.seconds_per_step,
        "rows_per_second": case.rows_per_second,
        "tokens_per_second": case.tokens_per_second,
        "input_wait_fraction": case.input_wait_fraction,
        **{f"{name}_efficiency": values for name, values in case.efficiency.items()},
    }
    single = dataclasses.asdict(case)
    for name in ("seconds_per_step", "rows_per_second", "input_wait_fraction", "efficiency"):
        del single[name]
    if case.layout is None:
        del single["layout"]
    return {
        **single,
        "scalings": list(case.scalings),
        "collectives": [dataclasses.asdict(each) for each in case.collectives],
        "flops_per_second": case.flops_per_second,
        "share_of_peak": case.share_of_peak,
        "share_of_product": case.share_of_product,
        "rounds": {name: values and list(values) for name, values in rounds.items()},
        "median_and_quartiles": {
            name: values and list(spread(values)) for name, values in rounds.items()
        },
    }


def to_markdown(bench: Bench, pictures: Sequence[str] = ()) -> str:
    """The same as GitHub's Markdown.

    Args:
        bench: what was measured.
        pictures: file names of plots to show, beside the text.
    """
    parts = ["# Bench", "\n".join(f"- {text}" for text in header(bench))]
    parts += [f"![{name}]({name})" for name in pictures]
    for heading, columns, cases in tables(bench):
        name, _, explanation = heading.partition(": ")
        parts += [f"## {name.capitalize()}", *([explanation] if explanation else [])]
        parts.append(_piped(columns, cases))
    parts.append("\n".join(f"- {text}" for text in footnotes(bench)))
    return "\n\n".join(part for part in parts if part) + "\n"


def _piped(columns: Sequence[Column], cases: Sequence[CaseResult]) -> str:
    heads = [" ".join(head.replace("-\n", "").split()) for head, _ in columns]
    lines = [heads, ["---", *["---:"] * (len(columns) - 1)], *cells(columns, cases)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def write_part(bench: Bench, path: Path) -> None:
    """Write what one job has measured, for the process that launched it."""
    path.write_text(json.dumps(dataclasses.asdict(bench)), encoding="utf-8")


def read_part(path: Path) -> Bench:
    """Return the bench that `write_part` wrote."""
    fields: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    cases = [_case(case) for case in fields["cases"]]
    return Bench(**{**fields, "cases": tuple(cases), "notes": tuple(fields["notes"])})


def _case(fields: Mapping[str, Any]) -> CaseResult:
    plain: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()
    }
    plain["collectives"] = tuple(Collectives(**each) for each in fields["collectives"])
    plain["efficiency"] = {name: tuple(each) for name, each in fields["efficiency"].items()}
    return CaseResult(**plain)
