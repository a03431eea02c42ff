"""`replicax doctor` in one process, and in two that disagree."""

import errno
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from support.command_line import Main
from support.figures import assert_mentions
from support.tiers import EXHAUSTIVE, only
from support.waiting import HANG_SECONDS

CHECKS = [
    "versions",
    "limits",
    "place",
    "coordinator",
    "joined",
    "differences",
    "clocks",
    "folder",
    "devices",
    "numbers",
    "mesh",
    "all-reduce",
]
FAST = ["--largest-mb", "0.1", "--timeout", "240"]


def verdicts(out: str) -> list[str]:
    """Return the verdict of each row of a table."""
    return re.findall(r" (ok|warning|problem|skipped)$", out, re.MULTILINE)


def test_json_has_the_verdicts_of_the_table(main: Main, folder: Path) -> None:
    (folder / "file").write_text("")
    arguments = ["doctor", *FAST, "--folders", "file", "."]
    code, out, _ = main(*arguments)
    assert code == 1
    json_code, text, _ = main(*arguments, "--json")
    said = json.loads(text)
    assert json_code == code
    assert [row["verdict"] for row in said["rows"]] == verdicts(out)
    assert said["verdict"] == "problem"
    assert said["rows"][-1]["figures"]["devices"] == 8
    assert out.splitlines()[-1] == "1 problem (folder)"


def test_contradicting_variables_hide_no_other_check(
    main: Main, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REPLICAX_PROCESS_ID", "4")
    monkeypatch.setenv("REPLICAX_PROCESSES", "4")
    monkeypatch.setenv("REPLICAX_COORDINATOR", "localhost:29400")
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    code, out, _ = main("doctor", "--json")
    rows = {row["check"]: row for row in json.loads(out)["rows"]}
    assert code == 1
    assert list(rows) == CHECKS
    assert rows["place"]["verdict"] == "problem"
    assert "REPLICAX_PROCESS_ID=4" in rows["place"]["found"]
    assert rows["devices"]["verdict"] == "ok"


def test_a_check_that_breaks_hides_no_other(main: Main, monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(*_: Any) -> None:
        raise ZeroDivisionError("division by zero")

    monkeypatch.setattr("replicax.doctor.examination.check_versions", breaks)
    monkeypatch.setattr("replicax.doctor.examination.check_folders", breaks)
    code, out, _ = main("doctor", "--json", *FAST)
    rows = {row["check"]: row for row in json.loads(out)["rows"]}
    assert code == 1
    assert [check for check in rows if rows[check]["verdict"] == "problem"] == [
        "versions",
        "folder",
    ]
    assert_mentions(rows["folder"]["found"], "ZeroDivisionError: division by")
    assert rows["all-reduce"]["verdict"] == "ok"


class Doctors:
    """Two processes of one job, each with its own changes of the environment."""

    def __init__(self, folder: Path, first: dict[str, str], second: dict[str, str], *more: str):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.folder = folder
        self.processes = []
        for number, changes in enumerate((first, second)):
            env = {
                **os.environ,
                "REPLICAX_PROCESS_ID": str(number),
                "REPLICAX_PROCESSES": "2",
                "REPLICAX_COORDINATOR": f"127.0.0.1:{self.port}",
                "REPLICAX_JOB_ID": "doctors",
                "JAX_NUM_CPU_DEVICES": "2",
                **changes,
            }
            with (folder / f"err{number}").open("w") as err:
                process = subprocess.Popen(
                    [sys.executable, "-m", "replicax", "doctor", "--json", *FAST, *more],
                    env=env,
                    cwd=folder,
                    stdout=subprocess.PIPE,
                    stderr=err,
                    text=True,
                )
            self.processes.append(process)

    def err(self, number: int) -> str:
        return (self.folder / f"err{number}").read_text()

    def end(self) -> tuple[dict[str, Any], list[int]]:
        """Return the report of process 0 by check, and the exit codes; process 1 prints nothing."""
        try:
            out, silence = [
                process.communicate(timeout=HANG_SECONDS)[0] for process in self.processes
            ]
        finally:
            for process in self.processes:
                process.kill()
        assert silence == ""
        rows: dict[str, Any] = {}
        for row in json.loads(out)["rows"]:
            known = rows.setdefault(row["check"], row)
            if row["verdict"] in ("warning", "problem"):
                rows[row["check"]] = {**known, **row}
        assert list(rows) == CHECKS
        return rows, [process.returncode for process in self.processes]


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def not_well(rows: dict[str, Any]) -> list[str]:
    return [check for check, row in rows.items() if row["verdict"] in ("warning", "problem")]


@EXHAUSTIVE
def test_two_processes_that_are_well(tmp_path: Path) -> None:
    rows, codes = Doctors(tmp_path, {}, {}).end()
    assert (codes, not_well(rows)) == ([0, 0], [])
    assert all(row["verdict"] == "ok" for row in rows.values())
    assert re.match(r"4 cpu devices\b.*\b2 processes", rows["devices"]["found"])
    assert re.match(r"sums over 4 devices are .*", rows["all-reduce"]["found"])
    assert re.search(r"the same\b.*2 processes .*one host", rows["folder"]["found"])
    pids = [process["pid"] for process in rows["joined"]["figures"]["processes"]]
    assert len(set(pids)) == 2


@EXHAUSTIVE
def test_two_processes_that_differ(tmp_path: Path) -> None:
    rows, codes = Doctors(tmp_path, {}, {"JAX_DEFAULT_MATMUL_PRECISION": "highest"}).end()
    assert (codes, not_well(rows)) == ([1, 1], ["joined"])
    found = rows["joined"]["found"]
    assert re.search(r"jax_default_matmul_precision .*highest .*process 1", found)


@EXHAUSTIVE
@pytest.mark.parametrize("broken", only([1], [0, 1]))
def test_a_process_without_devices_keeps_nobody_waiting(broken: int, tmp_path: Path) -> None:
    changes: list[dict[str, str]] = [{}, {}]
    changes[broken] = {"JAX_PLATFORMS": "cuda"}
    rows, codes = Doctors(tmp_path, *changes).end()
    assert codes == [1, 1]
    assert not_well(rows) == ["differences", "devices"]
    assert "JAX_PLATFORMS=cuda" in rows["devices"]["found"]
    assert ("process 1" in rows["devices"]["found"]) == (broken == 1)
    assert rows["all-reduce"]["verdict"] == "skipped"


@EXHAUSTIVE
def test_a_port_that_is_taken(tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        address = {"REPLICAX_COORDINATOR": f"127.0.0.1:{other.getsockname()[1]}"}
        rows, codes = Doctors(tmp_path, address, address, "--timeout", "1").end()
    assert codes == [1, 1]
    assert not_well(rows) == ["coordinator"]
    assert os.strerror(errno.EADDRINUSE) in rows["coordinator"]["found"]
    assert rows["joined"]["verdict"] == "skipped"


@EXHAUSTIVE
def test_a_process_with_the_wrong_coordinator(tmp_path: Path) -> None:
    wrong = {"REPLICAX_COORDINATOR": "127.0.0.1:1"}
    doctors = Doctors(tmp_path, {}, wrong, "--timeout", "4")
    rows, codes = doctors.end()
    assert codes == [1, 1]
    assert not_well(rows) == ["joined"]
    assert re.search(r"process 1 of 2 .*not join .*4 s", rows["joined"]["found"])
    assert "process 1, coordinator:" in doctors.err(1)
    assert re.search(r"127\.0\.0\.1:\d+.*connection refused", doctors.err(1))


def test_a_process_that_is_killed(tmp_path: Path) -> None:
    doctors = Doctors(tmp_path, {}, {}, "--largest-mb", "512")
    deadline = time.monotonic() + HANG_SECONDS
    while "Gloo" not in doctors.err(1):  # its devices are joined
        assert time.monotonic() < deadline
        time.sleep(0.02)
    doctors.processes[1].send_signal(signal.SIGKILL)
    rows, codes = doctors.end()
    assert codes == [1, -signal.SIGKILL]
    (check,) = not_well(rows)
    assert check in ("devices", "mesh", "all-reduce")
    assert "process 1" in rows[check]["found"]
    assert_mentions(rows[check]["found"], "process 1", "killed")


def catches_sigterm(process: subprocess.Popen[str]) -> bool:
    """Return whether the process already handles the signal."""
    caught = Path(f"/proc/{process.pid}/status").read_text().partition("SigCgt:")[2].split()[0]
    return bool(int(caught, 16) >> (signal.SIGTERM - 1) & 1)


@EXHAUSTIVE
def test_a_launcher_that_ends_it_still_gets_the_report(tmp_path: Path) -> None:
    doctors = Doctors(tmp_path, {}, {"REPLICAX_COORDINATOR": "127.0.0.1:1"})
    deadline = time.monotonic() + HANG_SECONDS
    while not (listens(doctors.port) and all(map(catches_sigterm, doctors.processes))):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    for process in doctors.processes:
        process.terminate()
    out = doctors.processes[0].communicate(timeout=HANG_SECONDS)[0]
    doctors.processes[1].communicate(timeout=HANG_SECONDS)
    (row,) = [row for row in json.loads(out)["rows"] if row["verdict"] == "problem"]
    assert row["check"] == "joined"
    assert "SIGTERM" in row["found"]
    assert [process.returncode for process in doctors.processes] == [1, 1]
