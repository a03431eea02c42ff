"""The command line: what it prints, and its exit codes."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.command_line import RECIPE, REGRESSION, Main, done, one_line, refusal
from support.figures import assert_mentions
from support.tiers import EXHAUSTIVE
from support.waiting import HANG_SECONDS, until

from replicax import cli

pytestmark = pytest.mark.usefixtures("folder")


def test_a_run_that_is_done_stays_as_it_is(main: Main, folder: Path) -> None:
    assert main(*REGRESSION, "--run", "once")[0] == 0
    before = (folder / "runs/once/records.jsonl").read_bytes()
    out = done(main, *REGRESSION, "--run", "once")
    assert_mentions(out, "resume runs/once: step 1, saved ", "complete at", "step 1: nothing")
    assert (folder / "runs/once/records.jsonl").read_bytes() == before


def test_another_configuration_needs_a_flag(main: Main, folder: Path) -> None:
    assert main(*REGRESSION, "--run", "once")[0] == 0
    before = (folder / "runs/once/config.json").read_bytes()
    line = refusal(main, *REGRESSION, "--run", "once", "--seed", "3", "--learning-rate", "0.5")
    assert "options.seed 0 -> 3" in line
    assert "fields.learning_rate 0.1 -> 0.5" in line
    assert "--accept-changes" in line
    assert (folder / "runs/once/config.json").read_bytes() == before
    more = ["--run", "once", "--seed", "3", "--learning-rate", "0.5", "--accept-changes"]
    out = done(main, *REGRESSION, *more)
    assert "change options.seed 0 -> 3 (accepted)" in out


def test_a_run_is_a_folder_in_runs(main: Main, folder: Path) -> None:
    for name in ("../out", "/tmp/out", "a/b", "", "..", "-x", "a" * 101, "a b", "a\0b"):
        assert_mentions(refusal(main, *REGRESSION, f"--run={name}"), "--run ", "in runs/")
    for minutes in ("-1", "nan", "inf"):
        line = refusal(main, *REGRESSION, f"--save-minutes={minutes}")
        assert f"--save-minutes {minutes}; " in line
    assert not (folder / "runs").exists()


def test_a_run_that_diverges_fails_with_its_cause(main: Main) -> None:
    code, _, err = main(*REGRESSION, "--epochs", "50", "--learning-rate", "1e6", "--log-every", "1")
    assert code == 1
    assert re.search(r"the (train|eval) loss is (nan|inf) at step \d+", one_line(err))


CRASH = (
    RECIPE
    + """
    def loss(self, model, batch, key):
        return batch["no such leaf"]
"""
)


def test_a_crash_in_a_recipe_shows_where_and_ends_with_the_cause(main: Main, folder: Path) -> None:
    (folder / "my_crash.py").write_text(CRASH)
    code, _, err = main("train", "my_crash.py:Mine")
    assert code == 1
    assert err.startswith("Traceback (most")
    assert "my_crash.py" in err
    assert re.fullmatch(r"replicax: KeyError: 'no such\b.*'", err.splitlines()[-1])


def test_a_syntax_error_in_a_recipe_shows_where(main: Main, folder: Path) -> None:
    (folder / "my_syntax.py").write_text("class Mine\n")
    code, _, err = main("train", "my_syntax.py:Mine")
    assert code == 1
    assert err.splitlines()[-1].startswith("replicax: SyntaxError: ")
    assert "my_syntax.py" in err


def test_show_sharding_reads_no_source_twice(main: Main, folder: Path) -> None:
    (folder / "my_stream.py").write_text(
        RECIPE.replace("epochs: int = 2", "epochs: int = 1")
        + """
    def train_source(self):
        yield {"x": super()._points(16, seed=0)["x"], "y": super()._points(16, seed=0)["y"]}
"""
    )
    out = done(main, "train", "my_stream.py:Mine", "--show-sharding")
    assert "batch  " in out
    assert "done: 1 steps, 16 rows" in out


class TestProcess:
    """Tests that need another process."""

    @pytest.fixture
    def environment(self) -> dict[str, str]:
        return {name: value for name, value in os.environ.items() if name != "JAX_NUM_CPU_DEVICES"}

    def test_a_user_error_is_the_exit_code_of_the_process(self) -> None:
        done = subprocess.run(
            [sys.executable, "-m", "replicax", "lint"],
            capture_output=True,
            text=True,
            timeout=HANG_SECONDS,
        )
        assert done.returncode == 2
        assert "replicax lint" in one_line(done.stderr)
        assert done.stdout == ""

    @EXHAUSTIVE
    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
    def test_a_signal_ends_a_run_with_everything_written(
        self, environment: dict[str, str], folder: Path, number: int
    ) -> None:
        run = folder / "runs" / "long"
        command = ["train", "linear_regression", "--epochs", "1000000", "--run", "long"]
        with subprocess.Popen(
            [sys.executable, "-m", "replicax", *command, "--devices", "2"],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as process:
            try:
                deadline = time.monotonic() + HANG_SECONDS
                while not (run / "records.jsonl").exists() or not (
                    (run / "records.jsonl").read_text().count("eval") > 2
                ):
                    assert time.monotonic() < deadline
                    assert process.poll() is None
                    time.sleep(0.05)
                process.send_signal(number)
                out, err = process.communicate(timeout=HANG_SECONDS)
            finally:
                process.kill()
        assert process.returncode == 75
        saved = "stopped early with everything saved; start it again: --run long"
        assert err == f"replicax: {saved}\n"
        *_, see = out.splitlines()
        (summary,) = (line for line in out.splitlines() if line.startswith("stopped after "))
        assert see.startswith("see    runs/long/")
        records = [json.loads(line) for line in (run / "records.jsonl").read_text().splitlines()]
        steps = [record["step"] for record in records if record["kind"] == "train"]
        assert steps == sorted(set(steps))
        stopped = int(summary.split()[2].replace(",", ""))
        assert "of 16,000,000 steps" in summary
        assert 0 <= stopped - steps[-1] < 50  # those after the last record are in the checkpoint
        assert (run / "checkpoints" / str(stopped)).is_dir()
        until((run / "curves.png").exists)


def test_a_reader_that_has_gone_ends_the_command_in_silence() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "replicax", "lint", "--help"]
    ended = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writing)
    assert (ended.returncode, ended.stderr) == (141, "")


def test_a_terminal_that_is_gone_does_not_change_the_exit_code(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with open("/dev/full", "w", buffering=1) as gone:
        monkeypatch.setattr(sys, "stderr", gone)
        assert cli.failed("stopped early", 75) == 75
        monkeypatch.undo()
        with pytest.raises(OSError, match="space"):  # the line is still in its buffer
            gone.flush()
        os.dup2(os.open(os.devnull, os.O_WRONLY), gone.fileno())
