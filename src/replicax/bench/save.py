"""Write a benchmark to files."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from replicax.analysis.compiled import Collectives
from replicax.bench.bench_result import Bench, CaseResult
from replicax.bench.numbers import spread
from replicax.bench.plots import draw_bench
from replicax.bench.report import to_markdown
from replicax.errors import MissingDependencyError


def write_bench(bench: Bench, folder: str | Path, *, pictures: Sequence[str] = ()) -> list[Path]:
    """Write `bench.json`, `bench.md` and `scaling.png` or `layouts.png`; return their paths.

    `bench.md` also shows `pictures` from the folder. Without matplotlib, it notes a missing plot.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    picture = "layouts.png" if bench.compares_layouts else "scaling.png"
    paths = [folder / "bench.json", folder / "bench.md", folder / picture]
    paths[0].write_text(json.dumps(bench_json(bench), indent=2) + "\n", encoding="utf-8")
    try:
        draw_bench(bench, paths[2])
        text = to_markdown(bench, [picture, *pictures])
    except MissingDependencyError as error:
        del paths[2]
        text = f"{to_markdown(bench, pictures)}- no {picture}: {error}\n"
    paths[1].write_text(text, encoding="utf-8")
    return paths


def bench_json(bench: Bench) -> dict[str, Any]:
    """Return all measurements of all rounds, and the medians with their quartiles."""
    return {**dataclasses.asdict(bench), "cases": [_case_to_json(case) for case in bench.cases]}


def _case_to_json(case: CaseResult) -> dict[str, Any]:
    single = dataclasses.asdict(case)
    rounds = {
        name: single.pop(name)
        for name in ("seconds_per_step", "rows_per_second", "input_wait_fraction")
    }
    rounds |= {f"{name}_efficiency": each for name, each in single.pop("efficiency").items()}
    rounds["tokens_per_second"] = case.tokens_per_second
    if case.layout is None:
        del single["layout"]
    return {
        **single,
        "flops_per_second": case.flops_per_second,
        "share_of_peak": case.share_of_peak,
        "share_of_product": case.share_of_product,
        "rounds": rounds,
        "median_and_quartiles": {
            name: values and spread(values) for name, values in rounds.items()
        },
    }


def write_part(bench: Bench, path: Path) -> None:
    """Write the measurements of one job, for the process that launched it."""
    path.write_text(json.dumps(dataclasses.asdict(bench)), encoding="utf-8")


def read_part(path: Path) -> Bench:
    """Return the bench that `write_part` wrote."""
    fields = _with_tuples(json.loads(path.read_text(encoding="utf-8")))
    cases = tuple(
        CaseResult(**case | {"collectives": tuple(Collectives(**e) for e in case["collectives"])})
        for case in fields["cases"]
    )
    return Bench(**fields | {"cases": cases})


def _with_tuples(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _with_tuples(each) for name, each in value.items()}
    return tuple(map(_with_tuples, value)) if isinstance(value, list) else value
