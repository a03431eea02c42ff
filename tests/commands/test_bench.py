import json
from pathlib import Path

import pytest
from command_line import Main, one_line

BENCH = ["bench", "linear_regression", "--points", "64", "--batch-size", "16", "--rounds", "1"]


def test_bench_prints_the_table_and_leaves_its_files(main: Main, folder: Path) -> None:
    code, out, err = main(*BENCH, "--devices", "1,2", "--modes", "jit,shard_map", "--run", "it")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0].startswith("data   64 points")
    assert any(line.split()[:2] == ["shard_map", "2"] for line in lines)
    assert max(len(line) for line in lines) <= 80
    assert lines[-1] == "see    runs/it/ (bench.json, bench.md, scaling.png, memory.png)"
    made = {path.name for path in (folder / "runs/it").iterdir()}
    assert made == {"bench.json", "bench.md", "scaling.png", "memory.png"}
    modes = {case["mode"] for case in json.loads(Path("runs/it/bench.json").read_text())["cases"]}
    assert modes == {"jit", "shard_map"}
    assert "(memory.png)" in Path("runs/it/bench.md").read_text()


def test_profile_leaves_a_trace_and_says_how_to_open_it(main: Main, folder: Path) -> None:
    options = ["--devices", "2", "--modes", "jit", "--profile", "--run", "it"]
    code, out, err = main(*BENCH, *options)
    assert (code, err) == (0, "")
    line, how = out.splitlines()[-2:]
    assert line.startswith("trace  runs/it/trace/plugins/profile/")
    assert line.endswith("perfetto_trace.json.gz")
    assert how == "       open it in https://ui.perfetto.dev"
    assert Path(line.split()[1]).stat().st_size > 100


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--devices", "1,two"], ["'1,two'", "1,2,4"]),
        (["--devices", ""], ["--devices ''", "1,2,4"]),
        (["--devices", "0"], ["devices=0", "at least 1"]),
        (["--devices", "1,16"], ["16", "8"]),
        (["--modes", "jit,both"], ["'both'", "shard_map"]),
        (["--rounds", "0"], ["rounds=0", "at least 1"]),
        (["--batch-size", "4", "--devices", "8"], ["4 rows", "8"]),
        (["--layout", "zero1", "--modes", "pmap"], ["pmap", "zero1"]),
        (["--devices", "8", "--pin"], ["8 devices", "cores"]),
        (["--precision", "float8"], ["'float8'", "--help"]),
    ],
)
def test_a_user_error_is_one_line_and_leaves_nothing(
    flags: list[str], words: list[str], main: Main, folder: Path
) -> None:
    code, _, err = main(*BENCH, *flags)
    line = one_line(err)
    assert code == 2
    for word in words:
        assert word in line
    assert not (folder / "runs").exists()


def test_a_folder_that_is_there_is_refused_before_anything_runs(main: Main, folder: Path) -> None:
    (folder / "runs/it").mkdir(parents=True)
    code, _, err = main(*BENCH, "--run", "it")
    assert code == 2
    assert "runs/it exists" in one_line(err)
