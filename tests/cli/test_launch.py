"""`replicax launch`: its flags and its output."""

import sys
from pathlib import Path

from support.command_line import Main, done, one_line, refusal
from support.figures import assert_mentions

KUBERNETES = ("launch", "--on", "kubernetes", "--processes", 4)
CPUS = ("--gpus-per-process", 0)
PYTHON = [sys.executable, "-S", "-c"]


def test_a_job_as_it_is_shown(main: Main, folder: Path) -> None:
    flags = ("--processes", 2, "--devices-per-process", 1)
    out = done(main, "launch", *flags, "--", *PYTHON, "print('--help')")
    started, logs, *lines = out.splitlines()
    assert started.startswith("launch 2 processes · 1 device each · job ")
    (made,) = (folder / "logs").iterdir()
    assert logs == f"logs   logs/{made.name}/"
    assert max(map(len, (started, logs))) <= 80
    assert sorted(lines) == ["[0] --help", "[1] --help"]
    assert sorted(path.name for path in made.iterdir()) == ["process-0.log", "process-1.log"]


def test_logs_of_islands_are_not_overwritten(main: Main, folder: Path) -> None:
    (folder / "mine").mkdir()
    (folder / "mine/island-0.log").touch()
    line = refusal(main, "launch", "--islands", 2, "--logs", "mine", "--", "true")
    assert "(island-0.log)" in line


def test_restarts_of_an_island_have_a_number_of_their_own(main: Main) -> None:
    for flags, number in (([], 20), (["--restarts", 3], 3)):
        code, out, err = main("launch", "--on", "slurm", "--islands", 2, *flags, "--", "true")
        assert (code, f" restarts={number}\n" in out) == (0, True)
        assert "--gpus-per-process" in one_line(err)
    _, _, err = main("launch", "--on", "slurm", "--islands", 2, *CPUS, "--", "true")
    assert err == ""


def test_a_restart_is_told_in_one_line(main: Main) -> None:
    arguments = ["--processes", 1, "--restarts", 1, "--logs", "mine"]
    code, _, err = main("launch", *arguments, "--", *PYTHON, "import sys; sys.exit(3)")
    assert code == 3
    first, second = err.splitlines()
    assert_mentions(first, "replicax: process 0 failed", "exit code 3 (see mine/process-0.log)")
    assert first.endswith("; restart 1 of 1")
    assert_mentions(
        second, "replicax: process 0 failed", "code 3 (see mine/process-0-attempt-2.log)"
    )
    assert_mentions(second, "all 1 restarts", "used up")


def test_an_engine_has_flags_of_its_own(main: Main) -> None:
    out = done(main, "launch", "--on", "slurm", "--help")
    assert "--partition" in out
    assert "--grace" not in out
    code, _, err = main("launch", "--partition", "x", "--processes", 1, "--", "true")
    assert (code, "'--partition'" in one_line(err)) == (2, True)


def test_a_manifest_for_kubernetes_is_printed(main: Main) -> None:
    out = done(main, *KUBERNETES, *CPUS, "--image", "mine:1", "--", "true")
    assert "kind: JobSet" in out
    code, _, err = main(*KUBERNETES, "--", "true")
    assert (code, "--image" in one_line(err)) == (2, True)
