"""`Logger`: what a slow or missing destination costs the run."""

import threading
import time
from pathlib import Path
from typing import Any

import pytest
from support.watched_run import WatchedRun

import replicax as rx
from replicax.errors import MissingDependencyError
from replicax.train.files.records import Record
from replicax.train.hooks import logger as module
from replicax.train.hooks.logger import MOST_WAITING, scalars


class Kept(rx.hooks.Logger):
    """Keeps its calls; `failing` names calls that raise, `free` lets them go on."""

    def __init__(self, failing: Any = lambda point, count: False) -> None:
        self.calls: list[tuple[str, Any]] = []
        self.free = threading.Event()
        self.free.set()
        self._failing = failing

    def open(self, start: Any) -> None:
        self._call("open", start.step)

    def write(self, record: Any) -> None:
        self._call("write", record.step)

    def go_back(self, start: Any) -> None:
        self._call("go_back", start.step)

    def close(self, error: Any) -> None:
        self._call("close", error)

    def _call(self, point: str, what: Any) -> None:
        self.free.wait(60)
        count = sum(call[0] == point for call in self.calls)
        self.calls.append((point, what))
        if self._failing(point, count):
            raise ConnectionError("nobody there\nat all")


def test_what_fails_is_said_once_and_tried_again() -> None:
    run = WatchedRun(hook := Kept(lambda point, count: point == "write" and count < 2))
    hook.start(run)
    for step in (1, 2, 3):
        run.trained(step, loss=1.0)
    hook.end(run)
    assert [step for point, step in hook.calls if point == "write"] == [1, 2, 3]
    assert len(run.lines) == 2
    assert "ConnectionError: nobody there" in run.lines[0]
    assert "2 of 3" in run.lines[1]


def test_what_cannot_be_opened_is_opened_by_a_later_record() -> None:
    run = WatchedRun(hook := Kept(lambda point, count: point == "open" and count < 2))
    hook.start(run)
    for step in (1, 2, 3):
        run.trained(step, loss=1.0)
    hook.end(run)
    assert [point for point, _ in hook.calls] == ["open"] * 3 + ["write"] * 2 + ["close"]
    assert "1 of 3" in run.lines[-1]


def test_what_was_never_opened_is_not_closed_and_goes_back_by_what_it_is_opened_with() -> None:
    run = WatchedRun(hook := Kept(lambda point, count: point == "open" and count < 3))
    run.trained(5, loss=1.0)
    hook.start(run)
    run.go_back(4, 0)
    run.trained(5, loss=1.0)
    hook.end(run)
    assert hook.calls == [("open", 5), ("open", 4)]


def test_a_place_that_hangs_costs_no_step_and_no_memory_without_end() -> None:
    run = WatchedRun(hook := Kept())
    hook.free.clear()
    started = time.perf_counter()
    hook.start(run)
    for step in range(MOST_WAITING + 10):
        run.trained(step, loss=1.0)
    assert time.perf_counter() - started < 5
    assert len(run.lines) == 1
    hook.free.set()
    hook.end(run)
    assert sum(point == "write" for point, _ in hook.calls) == MOST_WAITING
    assert len(run.lines) == 2
    assert "10 of 1,010" in run.lines[1]


def test_the_end_waits_no_longer_than_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "END_SECONDS", 0.05)
    run = WatchedRun(hook := Kept())
    hook.free.clear()
    hook.start(run)
    run.trained(1, loss=1.0)
    hook.end(run)
    hook.free.set()
    assert [line[:5] for line in run.lines] == ["ALARM", "Kept:"]


def test_no_answer_is_said_while_the_run_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SLOW_SECONDS", 0.0)
    run = WatchedRun(hook := Kept())
    hook.free.clear()
    hook.start(run)
    while hook._asked_at is None:
        time.sleep(0.001)
    time.sleep(0.001)
    run.trained(1, loss=1.0)
    hook.free.set()
    hook.end(run)
    assert len(run.lines) == 1
    assert "response" in run.lines[0]


def test_other_processes_log_nothing() -> None:
    run = WatchedRun(hook := Kept(), is_main=False)
    hook.start(run)
    run.trained(1, loss=1.0)
    run.go_back(0, 0)
    hook.end(run)
    assert hook.calls == []


def test_a_missing_package_of_a_logger_of_ones_own_is_in_no_extra(tmp_path: Path) -> None:
    hook = Kept()
    hook.package = "no_such_package"
    with pytest.raises(MissingDependencyError, match=r"install no_such_package$"):
        hook.before_run(WatchedRun(hook, tmp_path))


def test_names_are_those_of_the_kind_and_figures_are_among_them() -> None:
    record = Record("train", 3, 1, {"loss": 2.0}, 10, 0.5, figures={"learning_rate": 0.5})
    assert scalars(record) == {
        "train/loss": 2.0,
        "train/learning_rate": 0.5,
        "train/epoch": 1.0,
        "train/rows_per_second": 20.0,
    }
