"""Tables of a bench: their contents, within 80 columns."""

import dataclasses
import re

import pytest
from bench.results import CASE, extreme, layouts, make_bench, scaled

from replicax.bench.bench_result import Bench
from replicax.bench.save import to_markdown


def test_resources_have_memory_compilation_reductions_and_flops() -> None:
    lines = str(scaled(1, 2, modes=("jit",))).splitlines()
    each = lines[lines.index("each step") :]
    assert each[2].split()[:4] == ["mode", "devices", "batch", "MiB"]
    assert each[3].split() == ["jit", "1", "256", "3.00", "1.25", "0", "0", "B", "100", "25%"]
    assert each[4].split()[:8] == ["jit", "2", "256", "3.00", "1.25", "1", "4.01", "kB"]
    assert re.search("one gradient .*2 devices .*4 kB", " ".join(map(str.strip, lines)))


def test_what_is_not_known_is_no_number() -> None:
    case = dataclasses.replace(CASE, flops_per_step=0, peak_bytes_per_device=None)
    text = str(make_bench(case))
    assert "GFLOP" not in text
    assert "product" not in text
    assert "peak\n" not in text
    both = str(make_bench(CASE, case))
    assert "GFLOP/s" in both
    assert " - " in both


def test_without_stages_no_word_of_a_bubble() -> None:
    bench = layouts()
    bench = dataclasses.replace(bench, cases=bench.cases[:-1])
    assert "bub" not in str(bench)


def test_without_one_device_there_is_no_speedup() -> None:
    bench = layouts()
    bench = dataclasses.replace(bench, cases=bench.cases[1:])
    lines = str(bench).splitlines()
    start = next(at for at, line in enumerate(lines) if line.startswith("layouts: 256 rows"))
    assert lines[start + 1].split() == ["de-", "state", "peak", "bub-"]
    both = dataclasses.replace(
        bench, cases=(*bench.cases, *layouts("pmap").cases[:1], *bench.cases[:1])
    )
    assert any(line.startswith("jit zero1") and " - " in line for line in str(both).splitlines())


@pytest.mark.parametrize(
    "bench",
    [extreme(), scaled(1, 2, 4, 8), layouts(), layouts(size=2000)],
    ids=["extreme", "usual", "layouts", "large layouts"],
)
def test_no_line_is_wider_than_a_terminal(bench: Bench) -> None:
    assert max(map(len, str(bench).splitlines())) <= 80


def test_markdown_has_the_tables_and_the_picture() -> None:
    text = to_markdown(scaled(1, 2), ["scaling.png"])
    assert "![scaling.png](scaling.png)" in text
    assert "| mode | devices | batch | rows/s | ms/step | efficiency | wait |" in text
    assert "| jit | 1 | 256 | 12,800 | 20.0 ± 5.0 | 100% | 2% |" in text
    assert "## Weak scaling" in text
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert len(rows) == 3 * (2 + 6)
