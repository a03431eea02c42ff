"""Standard output that is full, closed, ASCII or gone: the run goes on, and warnings appear."""

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.command_line import REGRESSION, Main

from replicax.text.streams import Unfailing, alarm, unfailing_stdout

FULL = Path("/dev/full")
needs_full = pytest.mark.skipif(not FULL.exists(), reason="this system has no /dev/full")


class Tee:
    """A minimal object in place of a stream."""

    def write(self, text: str) -> None:
        raise RuntimeError("the other end is gone")


@pytest.mark.parametrize("target", [None, "closed", "tee"])
def test_no_stream_is_no_error(target: str | None) -> None:
    closed = io.StringIO()
    closed.close()
    stream: Any = Unfailing({"closed": closed, "tee": Tee()}.get(str(target)), tells=False)
    print("a line", file=stream, flush=True)
    assert not stream.isatty()


def test_an_alarm_names_the_process(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    alarm("failed", "process 1: ")
    assert capsys.readouterr().err == "process 1: ALARM  failed\n"
    monkeypatch.setattr(sys, "stderr", None)
    alarm("nobody hears it")


@pytest.mark.promise("outside.output-may-fail")
@needs_full
def test_training_goes_on_without_its_output(
    main: Main, monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    with FULL.open("w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        with unfailing_stdout():
            code, _, err = main(*REGRESSION, "--run", "a")
    assert (code, err.count("ALARM")) == (0, 1)
    assert len((folder / "runs/a/records.jsonl").read_text().splitlines()) > 0


def test_lines_and_records_as_json(main: Main, folder: Path) -> None:
    flags = (*REGRESSION, "--log-format", "json")
    told = [json.loads(line) for line in main(*flags)[1].splitlines()]
    lines = [each["line"] for each in told if "line" in each]
    assert len([line for line in lines if line.startswith("done: ")]) == 1
    records = [each["record"] for each in told if "record" in each]
    (run,) = (folder / "runs").iterdir()
    assert records == list(map(json.loads, (run / "records.jsonl").read_text().splitlines()))
    code, _, err = main(*flags, "--run", run.name, "--seed", 9)
    first, _ = err.splitlines()
    assert (code, json.loads(first)["error"]) == (2, "ConfigError")


@pytest.mark.exhaustive
@pytest.mark.parametrize("how", ["full", "closed", "ascii", "nobody reads"])
def test_the_command_ends_with_0(how: str, tmp_path: Path) -> None:
    more = {"PYTHONIOENCODING": "ascii"} if how == "ascii" else {}
    end = {"full": ">/dev/full", "closed": ">&-", "ascii": ">log", "nobody reads": "| true"}[how]
    command = " ".join(["-m", "replicax", *REGRESSION, "--run", "a"])
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {sys.executable} {command} {end}"],
        cwd=tmp_path,
        env={**os.environ, **more},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, "Traceback" in done.stderr) == (0, False)
    assert (tmp_path / "runs/a/checkpoints").is_dir()
