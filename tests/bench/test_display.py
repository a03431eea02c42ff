"""The line that is shown while a bench goes on."""

import sys

import pytest

from replicax.bench import measurement as module
from replicax.bench.measurement import Display


def test_what_is_left_is_estimated_from_what_was_done(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter([100.0, 104.0])
    monkeypatch.setattr(module.time, "monotonic", lambda: next(clock))
    display = Display(True, cases=4, rounds=5)
    display.compiling(0, "jit on 1 device", 0.0)
    display.compiling(2, "pmap on 2 devices", 1.0)  # 2 s a case, half a second a run
    display.round(3, 2.0)
    display.close()
    assert capsys.readouterr().out.splitlines() == [
        "compiling 1/4: jit on 1 device",
        "compiling 3/4: pmap on 2 devices · about 14 s left",
        "round 4/5 · about 4.0 s left",
    ]


def test_a_terminal_without_rich_gets_plain_lines(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setitem(sys.modules, "rich.console", None)
    Display(True, cases=1, rounds=1).round(0, 1.0)
    assert capsys.readouterr().out == "round 1/1 · about 1.0 s left\n"


def test_nothing_is_shown_where_nothing_is_wanted(capsys: pytest.CaptureFixture[str]) -> None:
    Display(False, cases=1, rounds=1).round(0, 1.0)
    assert capsys.readouterr().out == ""
