"""The progress line of a bench."""

import sys

import pytest

from replicax.bench import measurement as module
from replicax.bench.measurement import Display


def test_what_is_left_is_estimated_from_what_was_done(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter([100.0, 103.0, 104.0])
    monkeypatch.setattr(module.time, "monotonic", lambda: next(clock))
    display = Display(True)
    assert display.left(0, 4) is None
    assert display.left(2, 4) == 4.0
    display.show("compiling 1/4")
    display.show("round 4/5", 14.0)
    display.close()
    lines = capsys.readouterr().out.splitlines()
    assert lines == ["compiling 1/4", "round 4/5 · about 14 s left"]


def test_a_terminal_without_rich_gets_plain_lines(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setitem(sys.modules, "rich.console", None)
    Display(True).show("round 1/1", 1.0)
    assert capsys.readouterr().out == "round 1/1 · about 1.0 s left\n"
