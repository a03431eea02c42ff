"""Messages and the failure file of a process that fails."""

import json
import re
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.cluster_jobs import opened
from support.waiting import HANG_SECONDS

from replicax.cluster import failure, link
from replicax.cluster.cluster_job import set_job
from replicax.cluster.watchdog import LoopProgress, StuckVerdict
from replicax.core.ground.in_flight import InFlight
from replicax.errors import AgreementError, IslandLeftError, interrupted


class JaxRuntimeError(RuntimeError):
    """Named like jaxlib's error of a device."""


WHY = "SIGTERM before the first step"


class Left(BaseException):
    """Raised in place of the end of this process."""


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The failure file."""

    def leave(code: int) -> None:
        raise Left(code)

    monkeypatch.setattr(failure, "leave_at_once", leave)
    monkeypatch.setenv("REPLICAX_FAILURE_FILE", str(tmp_path / "failure.json"))
    return tmp_path / "failure.json"


def written(path: Path) -> dict[str, Any]:
    word: dict[str, Any] = json.loads(path.read_text())
    assert word.pop("time") > 1.7e9
    return word


def test_the_first_word_stands(path: Path) -> None:
    failure.write_failure(3, "ValueError: bad value", blames=None)
    failure.write_failure(3, "later", blames=[1])
    error = "ValueError: bad value"
    assert written(path) == {"process": 3, "error": error, "step": 0, "blames": None}


def test_nobody_asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    failure.write_failure(0, "x", blames=None)
    monkeypatch.setenv("REPLICAX_FAILURE_FILE", str(tmp_path / "missing" / "file"))
    failure.write_failure(0, "x", blames=None)
    assert list(tmp_path.iterdir()) == []


def test_a_lone_process_fails(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REPLICAX_PROCESS_ID", "2")
    failure.end(ValueError("two\nlines"), 1)  # and ends as Python does
    word = written(path)
    assert (word["process"], word["error"]) == (2, "ValueError: two lines")


@pytest.mark.parametrize(("process", "said"), [(0, " stops: "), (1, " stops, like the others: ")])
def test_a_verdict_is_said_and_written(
    process: int, said: str, path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(Left, match="1"):
        failure.stop_now(process, LoopProgress(InFlight()), StuckVerdict("process 1 is late", [1]))
    assert capsys.readouterr().err == f"replicax: process {process}{said}process 1 is late\n"
    assert written(path)["blames"] == [1]


def test_a_victim_of_such_a_stop_ends_like_the_others(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The devices of the failed process are gone before its message arrives."""
    with opened(2) as job:
        first, second = job.start()
        set_job(first.job)
        job.call(time.sleep, 0.2).add_done_callback(lambda _: second.link.stop_all(WHY, 75))
        with pytest.raises(Left, match="75"):
            failure.end(JaxRuntimeError("connection reset by peer"), 1)
    assert capsys.readouterr().err == f"replicax: process 0 stops: {WHY}\n"
    assert not path.exists()


@pytest.mark.parametrize(("told", "where"), [(None, ""), ("2", "process 2 stops: ")])
def test_who_has_not_joined_the_others_stops_alone(
    told: str | None,
    where: str,
    path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if told is None:
        monkeypatch.delenv("REPLICAX_PROCESS_ID", raising=False)
    else:
        monkeypatch.setenv("REPLICAX_PROCESS_ID", told)
    with pytest.raises(Left, match="75"):
        failure.stop_all_now(WHY)
    assert capsys.readouterr().err == f"replicax: {where}{WHY}\n"
    assert not path.exists()


def test_who_stops_all_ends_even_if_process_0_does_not_answer(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(link, "_ACKNOWLEDGE_SECONDS", 0.3)
    with opened(2) as job:
        _, second = job.start()
        set_job(second.job)
        with job.hub_asleep(), pytest.raises(Left, match="75"):
            failure.stop_all_now(WHY)
    assert capsys.readouterr().err == f"replicax: process 1 stops: {WHY}\n"


def test_the_stacks_come_with_it(path: Path) -> None:
    script = (
        "from replicax.cluster.failure import stop_now\n"
        "from replicax.cluster.watchdog import LoopProgress\n"
        "from replicax.cluster.watchdog import StuckVerdict\n"
        "from replicax.core.ground.in_flight import InFlight\n"
        "progress, late = LoopProgress(InFlight()), StuckVerdict('late', [1], stacks=True)\n"
        "def waiting_here(): stop_now(0, progress, late)\n"
        "waiting_here()"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 1
    assert "replicax: process 0 has begun 0 steps" in done.stderr
    assert "in waiting_here" in done.stderr
    assert done.stderr.endswith("replicax: process 0 stops: late\n")


def test_a_failure_of_its_own(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with opened(2) as job:
        first, second = job.start()
        set_job(second.job)
        with pytest.raises(Left, match="7"):
            failure.end(ValueError("bad value"), 7)
        assert first.reason().endswith(" failed: ValueError: bad value")
    assert written(path) == {
        "process": 1,
        "error": "ValueError: bad value",
        "step": 0,
        "blames": None,
    }
    assert capsys.readouterr().err == ""  # Python has printed the exception


def test_a_victim_says_who_was_killed(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with opened(3) as job:
        processes = job.start()
        set_job(processes[0].job)
        job.call(lambda: processes[2].link.close())
        failure.report(JaxRuntimeError("connection reset by peer"))
    assert written(path)["blames"] == [2]
    error = capsys.readouterr().err
    assert re.match(r"replicax: process 0 stops: process 2 \(.*disconnected\b.*killed", error)


@pytest.mark.parametrize("name", ["JaxRuntimeError", "XlaRuntimeError"])
def test_what_looks_like_another_s_fault(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[bool] = []

    class Recorder:
        verdict, process = None, 0

        def fail(self, error: str, *, collateral: bool) -> None:
            told.append(collateral)

    monkeypatch.setattr(failure, "_link", Recorder)
    failure.report(type(name, (RuntimeError,), {})("x"))
    failure.report(RuntimeError("x"))
    failure.report(ValueError("UNKNOWN: Gloo all-reduce failed"))
    assert told == [True, False, True]


def test_what_another_s_end_causes_is_not_printed_below_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Told:
        verdict, process = StuckVerdict("process 1 is late", [1]), 0

    def leave(code: int) -> None:
        pass

    monkeypatch.setattr(failure, "leave_at_once", leave)
    monkeypatch.setattr(failure, "_link", Told)
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    failure.watch_exceptions()
    for error in (ValueError("UNKNOWN: Gloo all-reduce failed"), ValueError("its own")):
        sys.excepthook(type(error), error, None)
    said = capsys.readouterr().err
    assert "Gloo" not in said
    assert "its own" in said


@pytest.mark.parametrize("kind", [AgreementError, IslandLeftError])
def test_an_error_that_all_raise_blames_nobody(path: Path, kind: type[Exception]) -> None:
    with opened(2) as job:
        first, second = job.start()
        set_job(second.job)
        failure.report(kind("steps is 2 on process 1, 1 on process 0"))
        second.link.close()  # the process ends
        time.sleep(0.2)
        assert not first.stopped.done()
        set_job(first.job)
        failure.report(kind("steps is 2 on process 1, 1 on process 0"))
        assert not first.stopped.done()
    assert written(path)["blames"] is None


def test_an_exception_ends_a_process_at_once(tmp_path: Path) -> None:
    """A process with peers ends even if one of its threads would go on."""
    script = (
        "import sys, threading, time\n"
        "from replicax.cluster import failure\n"
        "class Link:\n"
        "    verdict, process = None, 0\n"
        "    def fail(self, error, *, collateral): print('told', error, flush=True)\n"
        "failure._link = Link\n"
        "failure.watch_exceptions()\n"
        "threading.Thread(target=time.sleep, args=(60,)).start()\n"
        "raise ValueError('bad value')"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=HANG_SECONDS
    )
    assert done.returncode == 1
    assert done.stdout == "told ValueError: bad value\n"
    assert done.stderr.strip().endswith("ValueError: bad value")


def test_a_ctrl_c_on_which_all_have_stopped_is_no_failure(path: Path) -> None:
    """Each process raises it, so none reports the failure of another."""
    stopped = interrupted(SimpleNamespace(step=7, saved=True, exit_code=75))
    with opened(2) as job, pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "excepthook", lambda *_: None)
        failure.watch_exceptions()
        for process in job.start():
            set_job(process.job)
            with pytest.raises(Left, match="75"):
                sys.excepthook(KeyboardInterrupt, stopped, None)
            assert not process.stopped.done()
    assert not path.exists()
