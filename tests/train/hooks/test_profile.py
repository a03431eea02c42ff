"""`Profile`: which steps it records, and where."""

import os
from pathlib import Path
from typing import Any

import jax
import pytest
from support.watched_run import WatchedRun

import replicax as rx
from replicax.errors import ConfigError
from replicax.train.dispatched import RunPosition


def there() -> str:
    return os.path.abspath("elsewhere")


class Steps:
    """Steps of a run, and what the profiler was asked between them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: list[Any] = []
        monkeypatch.setattr(
            jax.profiler, "start_trace", lambda folder: self.seen.append(("on", folder))
        )
        monkeypatch.setattr(jax.profiler, "stop_trace", lambda: self.seen.append("off"))

    def do(self, hook: rx.hooks.Profile, run: Any, steps: range) -> list[Any]:
        run.state = {}
        run.place = RunPosition(steps.start - 1, 0, 0)
        hook.start(run)
        for step in steps:
            hook.before_step(run, None)
            self.seen.append(step)
            run.place = RunPosition(step, 0, 0)
            hook.dispatched(run, run)
        hook.end(run)
        seen, self.seen = self.seen, []
        return seen


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Steps:
    monkeypatch.chdir(tmp_path)
    return Steps(monkeypatch)


def test_it_records_the_steps_from_the_first_to_the_last(steps: Steps, tmp_path: Path) -> None:
    run = WatchedRun(hook := rx.hooks.Profile(2, 3), tmp_path)
    on = ("on", str(tmp_path / "profile"))
    assert steps.do(hook, run, range(1, 6)) == [1, on, 2, 3, "off", 4, 5]
    assert len(run.lines) == 1
    assert str(tmp_path / "profile") in run.lines[0]


def test_a_start_in_the_middle_of_them_records_the_rest(steps: Steps) -> None:
    run = WatchedRun(hook := rx.hooks.Profile(2, 3, "elsewhere"))
    assert steps.do(hook, run, range(3, 5)) == [("on", there()), 3, "off", 4]
    assert steps.do(hook, run, range(4, 6)) == [4, 5]


def test_a_run_that_ends_among_them_or_before_says_so(steps: Steps) -> None:
    run = WatchedRun(hook := rx.hooks.Profile(2, 5, "elsewhere"))
    assert steps.do(hook, run, range(1, 4)) == [1, ("on", there()), 2, 3, "off"]
    assert "2 to 3" in run.lines[0]
    assert steps.do(hook, run, range(1, 2)) == [1]
    assert len(run.lines) == 2


def test_another_process_records_nothing(steps: Steps) -> None:
    run = WatchedRun(hook := rx.hooks.Profile(1, 2), is_main=False)
    assert steps.do(hook, run, range(1, 4)) == [1, 2, 3]
    assert run.lines == []


@pytest.mark.parametrize(("text", "first", "last"), [("100:110", 100, 110), ("7", 7, 7)])
def test_the_command_lines_form(text: str, first: int, last: int) -> None:
    hook = rx.hooks.Profile.parse(text)
    assert (hook._first, hook._last) == (first, last)


@pytest.mark.parametrize("text", ["", "a:b", "5:", ":5", "1:2:3", "-1:2", "0:3", "5:4", "1.5"])
def test_text_that_names_no_steps_is_refused(text: str) -> None:
    with pytest.raises(ConfigError) as raised:
        rx.hooks.Profile.parse(text)
    assert "\n" not in str(raised.value)


def test_a_run_without_a_folder_is_refused() -> None:
    with pytest.raises(ConfigError, match="run_dir"):
        rx.hooks.Profile(1, 2).start(WatchedRun(rx.hooks.Profile(1, 2)))
