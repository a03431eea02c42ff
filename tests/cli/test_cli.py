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


def test_a_users_recipe_trains(main: Main, folder: Path) -> None:
    (folder / "my_recipe.py").write_text(RECIPE)
    out = done(
        main, "train", "my_recipe.py:Mine", "--offset", "0.5", "--log-every", "1", "--run", "mine"
    )
    assert "epoch  48 rows in 3 batches" in out
    assert "\ndone: 6 steps, 96 rows in " in out
    assert out.endswith(
        "see    runs/mine/ (config.json, records.jsonl, curves.png, checkpoints/)\n"
    )
    assert "\x1b" not in out
    config = json.loads((folder / "runs/mine/config.json").read_text())
    assert config["recipe"] == "my_recipe.py:Mine"
    assert config["fields"]["offset"] == 0.5
    assert config["options"]["log_every"] == 1
    records = (folder / "runs/mine/records.jsonl").read_text().splitlines()
    steps = [json.loads(line)["step"] for line in records if '"train"' in line]
    assert steps == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(
    ("flags", "mesh"),
    [
        (["--devices", "3"], "3 cpu devices · 3 replicas · mode jit"),
        (["--mode", "single"], "1 cpu device · 1 replica · mode single"),
        (["--mode", "shard_map", "--accumulate", "2"], "8 replicas · mode shard_map"),
        (["--layout", "fsdp"], "layout fsdp"),
    ],
)
def test_flags_choose_devices_mode_and_layout(flags: list[str], mesh: str, main: Main) -> None:
    out = done(main, *REGRESSION, "--batch-size", "48", *flags)
    assert mesh in out
    assert "done: 1 steps, 48 rows" in out


def test_underscores_in_flags_are_dashes(main: Main) -> None:
    out = done(main, "train", "linear_regression", "--batch_size=24", "--steps=2")
    assert "batch  24 rows" in out
    assert "done: 2 steps, 48 rows" in out


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


def test_the_default_run_folder_has_the_recipes_name(main: Main, folder: Path) -> None:
    assert main(*REGRESSION)[0] == 0
    (run,) = (folder / "runs").iterdir()
    assert re.fullmatch(r"linear_regression-\d{8}-\d{6}", run.name)


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


def test_show_sharding_draws_state_and_batch(main: Main) -> None:
    plain = done(main, *REGRESSION, "--devices", "2", "--run", "plain")
    out = done(main, *REGRESSION, "--devices", "2", "--run", "drawn", "--show-sharding")
    lines = out.splitlines()
    assert set(plain.splitlines()[:3]) < set(lines)
    start = next(place for place, line in enumerate(lines) if line.startswith("shards "))
    assert [line.strip("│ ") for line in lines[start + 1 : start + 11] if "CPU" in line] == [
        "CPU 0,1",
        "CPU 0",
        "CPU 1",
    ]
    assert "batch  64 rows  P('data')" in lines[start:]
    assert any(line.startswith("compiling") for line in lines[start:])
    assert "┌" not in plain


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

    def test_devices_are_made_to_order(self, environment: dict[str, str], folder: Path) -> None:
        (folder / "my_recipe.py").write_text(RECIPE)
        done = subprocess.run(
            [sys.executable, "-m", "replicax", "train", "my_recipe.py:Mine", "--devices", "6"],
            env=environment,
            capture_output=True,
            text=True,
            timeout=HANG_SECONDS,
        )
        assert (done.returncode, done.stderr) == (0, "")
        assert "mesh   6 cpu devices · 6 replicas" in done.stdout
        assert re.search(r"^batch  16 rows, .* 18, 6 replicas x 3 rows$", done.stdout, re.M)
        assert "\x1b" not in done.stdout
        assert "\r" not in done.stdout

    def test_a_user_error_is_the_exit_code_of_the_process(
        self, environment: dict[str, str]
    ) -> None:
        done = subprocess.run(
            [sys.executable, "-m", "replicax", *REGRESSION, "--devices", "0"],
            env=environment,
            capture_output=True,
            text=True,
            timeout=HANG_SECONDS,
        )
        assert done.returncode == 2
        assert "--devices 0" in one_line(done.stderr)
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
    command = [sys.executable, "-m", "replicax", "recipes"]
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
