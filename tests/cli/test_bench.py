import json
import os
import re
import sys
from pathlib import Path

import pytest
from support.command_line import Main, done
from support.tiers import EXHAUSTIVE

from replicax.cli.bench import over_heads
from replicax.errors import ConfigError

BENCH = ["bench", "linear_regression", "--points", "64", "--batch-size", "16", "--rounds", "1"]


MLP = ["bench", "mlp", "--rows", "64", "--batch-size", "16", "--rounds", "1", "--hidden", "8"]


@EXHAUSTIVE
def test_layouts_are_compared_by_the_rules_of_a_recipe(main: Main, folder: Path) -> None:
    options = ["--layers", "4", "--devices", "4", "--layouts", "replicated,model,stages"]
    out = done(main, *MLP, *options, "--run", "it")
    lines = out.splitlines()
    assert max(len(line) for line in lines) <= 80
    rows = [line.split()[:3] for line in lines if line.startswith("jit ")]
    assert rows == [["jit", "data", "1"], ["jit", "data", "4"], ["jit", "model=4", "4"]]
    assert lines[-1] == "see    runs/it/ (bench.json, bench.md, layouts.png)"
    notes = " ".join(map(str.strip, lines))
    assert re.search(r"note: jit stages .* 4 devices .*skipped", notes)


def test_heads_stay_whole(folder: Path) -> None:
    mesh = over_heads(6)
    assert dict(mesh(4).shape) == {"data": 2, "model": 2, "stage": 1}
    assert dict(mesh(6).shape) == {"data": 1, "model": 6, "stage": 1}
    with pytest.raises(ConfigError, match=r"5 devices with .*=6"):
        mesh(5)


def test_profile_leaves_a_trace_and_says_how_to_open_it(main: Main, folder: Path) -> None:
    options = ["--devices", "2", "--modes", "jit", "--profile", "--run", "it"]
    out = done(main, *BENCH, *options)
    line, how = out.splitlines()[-2:]
    assert line.startswith("trace  runs/it/trace/plugins/profile/")
    assert line.endswith("perfetto_trace.json.gz")
    assert how.endswith("https://ui.perfetto.dev")
    assert Path(line.split()[1]).stat().st_size > 100
    files = {path.name for path in Path("runs/it").iterdir()}
    assert {"bench.json", "bench.md", "scaling.png", "memory.png"} <= files


@EXHAUSTIVE
@pytest.mark.skipif(
    sys.platform != "linux" or len(os.sched_getaffinity(0)) < 2, reason="needs two cores on Linux"
)
def test_processes_are_measured_with_a_core_each(main: Main, folder: Path) -> None:
    out = done(main, *BENCH, "--processes", "1,2", "--modes", "shard_map", "--run", "it")
    lines = out.splitlines()
    assert any(re.fullmatch(r"weak scaling: 8 rows .*process", line) for line in lines)
    assert max(len(line) for line in lines) <= 80
    assert lines[-1] == "see    runs/it/ (bench.json, bench.md, scaling.png, jobs/)"
    result = json.loads((folder / "runs/it/bench.json").read_text())
    assert (result["scaled_over"], result["pinned"]) == ("processes", True)
    assert result["environment"]["cores"] == len(os.sched_getaffinity(0))
    one, two = result["cases"]
    assert [case["devices"] for case in (one, two)] == [1, 2]
    assert [case["global_batch"] for case in (one, two)] == [8, 16]
    expected = one["rounds"]["seconds_per_step"][0] / two["rounds"]["seconds_per_step"][0]
    assert two["rounds"]["weak_efficiency"] == [pytest.approx(expected)]
    # The gradient of two numbers, and the loss's three sums.
    assert two["collectives"] == [{"kind": "all-reduce", "count": 1, "bytes": 20}]
    cores = [
        json.loads(part.read_text())["environment"]["cores"]
        for part in sorted((folder / "runs/it/jobs").glob("*/part.json"))
    ]
    assert cores == [1, 1]
