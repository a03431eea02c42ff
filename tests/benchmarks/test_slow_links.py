"""`benchmarks/slow_links.py`: its methods, the figures of made-up measurements, and a small run."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import pytest
from slow_links_bench import LinkBench, LinkCase, _cases, bench_links
from slow_links_island import ALONE
from slow_links_methods import METHOD_NAMES, link_methods
from slow_links_report import draw_links, link_json, link_table
from support.pictures import saved_figures
from support.tiers import exhaustive

from replicax.bench.machine import environment
from replicax.errors import ClusterError
from replicax.text.table import WIDTH

ROOT = Path(__file__).resolve().parents[2]
ARRAYS = [jax.ShapeDtypeStruct((4096 * 64,), "float32")]


@pytest.mark.parametrize("every", [2, 5, 6, 7, 30, 100])
def test_methods_are_possible_with_rounds_of_any_length(every: int) -> None:
    methods = link_methods(every)
    assert tuple(methods) == METHOD_NAMES
    for method in methods.values():
        for each in (method, method.own_work):
            assert each.measured_steps % each.schedule.interval == 0


def answers(*seconds: float, sent_bytes: float = 0) -> list[dict[str, float]]:
    return [{"seconds": each, "sent_bytes": sent_bytes} for each in seconds]


def made_up_case() -> tuple[tuple[float, ...], list[LinkCase]]:
    method = link_methods(30)["rounds-int4"]
    runs: Any = {
        (ALONE, True): [(30, answers(3.0, 3.0)), (30, answers(2.8, 3.2))],
        (method.name, True): [(30, answers(3.75, 3.75, sent_bytes=600))] * 2,
        # Two steps of 0.1 s, and 0.15 s for one exchange, five times.
        (method.name, False): [(10, answers(1.75, 1.75))] * 2,
    }
    return _cases(2, [method], runs, ARRAYS, lambda *_: 0.84)


def made_up_bench() -> LinkBench:
    alone, cases = made_up_case()
    return LinkBench(
        network="100Mbit",
        islands=2,
        bytes_per_second=12.5e6,
        shaped_by="a throttling relay",
        why_relay="asked for",
        parameters=ARRAYS[0].size,
        alone_step_seconds=alone,
        cases=tuple(cases),
        repetitions=2,
        environment=environment(),
        seed=0,
        seconds=10.0,
        notes=("a",),
    )


def test_a_table_has_80_columns() -> None:
    lines = link_table(made_up_bench())
    assert max(map(len, lines)) <= WIDTH
    [row] = [line.split() for line in lines if "rounds-int4" in line]
    assert row[:2] == ["rounds-int4,", "30"]
    assert row[-5:] == ["80%", "84%", "-4.0", "81%", "-0.6"]


def test_figures_and_the_plot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, figures = made_up_bench(), saved_figures(monkeypatch)
    read = json.loads(json.dumps(link_json(made)))
    [case] = read["cases"]
    assert case["points_apart"] == pytest.approx(-4)
    # 34 bytes of int4 for 64 values, to one other island, once in 30 steps.
    assert case["formula_bytes_per_step"] == pytest.approx(34 / 64 * ARRAYS[0].size / 30)
    draw_links(made, tmp_path / "links.png")
    [axis] = figures[0].axes
    assert [bar.get_height() for bar in axis.patches] == pytest.approx([80])


def test_an_island_that_ends_is_an_error_with_its_last_line(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match=r"island \d .*broken.*island-\d\.log"):
        bench_links(
            [sys.executable, "-c", "raise SystemExit('broken')"],
            2,
            "1Gbit",
            125e6,
            [link_methods(30)["int4"]],
            lambda *_: 1.0,
            logs=tmp_path,
            relay=True,
            progress=False,
        )


@pytest.mark.parametrize("relay", [exhaustive(True), exhaustive(False)])
def test_islands_are_measured(relay: bool, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--layers", "1", "--width", "64", "--every", "30", "--rounds", "2"]
    methods = ["--methods", "float32", "rounds-sparse", "streamed-int4"]
    command = [sys.executable, str(ROOT / "benchmarks/slow_links.py"), "--dry", *sizes, *methods]
    more = ["--networks", "100Mbit", "--islands", "2", "3", *["--relay"] * relay]
    told = subprocess.run([*command, *more], check=True, capture_output=True, text=True).stdout
    rows = [line.split() for line in told.splitlines() if re.match(r"(float32|\w+-\w+, 30) ", line)]
    shares = [next(cell for cell in row if re.fullmatch(r"\d\.\d{3}", cell)) for row in rows]
    assert len(shares) == 6
    assert [float(share) for share in shares] == pytest.approx([1] * 6, rel=0.15)
