"""`bench --network`: what methods send, the figures of made-up measurements, and a small run."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.figures import refused
from support.pictures import saved_figures
from support.tiers import exhaustive

from replicax.bench import link_bench
from replicax.bench.link_bench import LinkBench, LinkCase, _cases
from replicax.bench.link_island import ALONE
from replicax.bench.link_methods import METHOD_NAMES, link_methods
from replicax.bench.link_report import link_json, link_table, write_link_bench
from replicax.bench.machine import environment
from replicax.cli.bench import bench
from replicax.errors import ConfigError
from replicax.text.table import WIDTH

PARAMETERS = 4096 * 64


@pytest.mark.parametrize(
    ("name", "bytes_per_step"),
    [
        ("float32", 4 * PARAMETERS),
        ("int4", 34 / 64 * PARAMETERS),
        ("rounds-float32", 4 * PARAMETERS / 30),
        ("rounds-int4", 34 / 64 * PARAMETERS / 30),
        ("rounds-sparse", 116 * 64 / 30),
        ("streamed-int4", 34 / 64 * PARAMETERS / 30),
    ],
)
def test_bytes_of_a_step(name: str, bytes_per_step: float) -> None:
    method = link_methods(30)[name]
    assert method.bytes_per_step(PARAMETERS, 2) == pytest.approx(bytes_per_step, rel=1e-3)
    assert method.bytes_per_step(PARAMETERS, 4) == pytest.approx(3 * bytes_per_step, rel=1e-3)


@pytest.mark.parametrize("every", [2, 5, 6, 7, 30, 100])
def test_methods_are_possible_with_rounds_of_any_length(every: int) -> None:
    methods = link_methods(every)
    assert tuple(methods) == METHOD_NAMES
    for method in methods.values():
        for each in (method, method.own_work):
            assert each.islands is None or each.islands.every == each.every
        assert method.measured_steps % method.interval == 0


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
    return _cases(2, [method], runs, PARAMETERS, lambda *_: 0.84)


def made_up_bench() -> LinkBench:
    alone, cases = made_up_case()
    return LinkBench(
        network="100Mbit",
        bytes_per_second=12.5e6,
        shaped_by="a throttling relay",
        why_relay="asked for",
        parameters=PARAMETERS,
        alone_step_seconds={2: alone},
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
    assert row[:3] == ["2", "rounds-int4,", "30"]
    assert row[-5:] == ["80%", "84%", "-4.0", "81%", "-0.6"]


def test_files_and_the_plot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, figures = made_up_bench(), saved_figures(monkeypatch)
    assert [path.name for path in write_link_bench(made, tmp_path)] == [
        "bench.json",
        "slow_links.png",
    ]
    read = json.loads((tmp_path / "bench.json").read_text())
    assert read == json.loads(json.dumps(link_json(made)))
    assert read["cases"][0]["points_apart"] == pytest.approx(-4)
    [axis] = figures[0].axes
    assert [bar.get_height() for bar in axis.patches] == pytest.approx([80])


@pytest.mark.parametrize(
    "flags",
    [
        ["--islands", "2"],
        ["--relay"],
        ["--network", "fast"],
        ["--network", "100Mbit,20ms"],
        ["--network", "a-b=100Mbit,20ms"],
        ["--network", "100Mbit", "--devices", "2"],
        ["--network", "100Mbit", "--pin"],
        ["--network", "100Mbit", "--islands", "1"],
        ["--network", "100Mbit", "--islands", "two"],
        ["--network", "100Mbit", "--every", "1"],
        ["--network", "100Mbit", "--methods", "int5"],
        ["--network", "100Mbit", "--methods", ","],
    ],
)
def test_what_cannot_be_measured_is_one_line(flags: list[str]) -> None:
    with refused(ConfigError):
        bench(["gpt2", *flags])


def test_an_island_that_ends_is_an_error_with_its_last_line(tmp_path: Path) -> None:
    with pytest.raises(link_bench.ClusterError, match=r"island \d .*broken.*island-\d\.log"):
        link_bench.bench_links(
            [sys.executable, "-c", "raise SystemExit('broken')"],
            [2],
            "1Gbit",
            125e6,
            [link_methods(30)["int4"]],
            lambda *_: 1.0,
            logs=tmp_path,
            relay=True,
            progress=False,
        )


def measured(tmp_path: Path, *flags: str) -> dict[str, Any]:
    model = ["gpt2", "--layers", "1", "--width", "64", "--context", "32", "--batch-size", "4"]
    command = [sys.executable, "-m", "replicax", "bench", *model, "--run", "x", "--rounds", "2"]
    subprocess.run([*command, "--network", "100Mbit", *flags], cwd=tmp_path, check=True)
    read: dict[str, Any] = json.loads((tmp_path / "runs" / "x" / "bench.json").read_text())
    return read


@pytest.mark.parametrize("flags", [exhaustive("--relay"), exhaustive("--every=30")])
def test_islands_are_measured(flags: str, tmp_path: Path) -> None:
    found = measured(tmp_path, flags, "--islands=2,3", "--methods=float32,rounds-sparse")
    assert [(case["islands"], case["method"]["name"]) for case in found["cases"]] == [
        *((2, "float32"), (2, "rounds-sparse"), (3, "float32"), (3, "rounds-sparse")),
    ]
    for case in found["cases"]:
        assert case["bytes_per_step"] == pytest.approx(case["formula_bytes_per_step"], rel=0.15)
        assert min(case["utilization"]) > 0
