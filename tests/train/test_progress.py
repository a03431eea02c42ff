"""The display of a run: nothing, plain lines, or a live line in a terminal or a notebook."""

import dataclasses
import fcntl
import math
import os
import pty
import struct
import sys
import termios
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from support.clock import Clock, clock_of
from support.figures import figures as numbers

from replicax.text.streams import Unfailing
from replicax.train.files.records import Record
from replicax.train.hooks import progress as module
from replicax.train.hooks.progress import PlainProgress, Progress, figures, open_progress

clock = clock_of(module)


def record(step: int = 3, seconds: float = 1.5, wait: float | None = 0.25) -> Record:
    return Record("train", step, 0, {"loss": 0.123456}, 96000, seconds, wait)


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        (record(), "epoch 1 · loss 0.1235 · 64,000 rows/s · wait 25%"),
        (record(seconds=0.0, wait=None), "epoch 1 · loss 0.1235"),
    ],
)
def test_figures_are_the_loss_the_rate_and_the_wait(given: Record, shown: str) -> None:
    assert figures(given) == shown


@pytest.mark.parametrize("told", [None, 1])  # unknown, or of a loader that has more
def test_an_unknown_length_has_no_time_left(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, told: int | None
) -> None:
    display = PlainProgress(told, Unfailing(sys.stdout))
    display.count(1)
    display.show(record())
    assert capsys.readouterr().out == ""  # figures only once in a while
    monkeypatch.setattr(module, "SECONDS_BETWEEN_LINES", 0.0)
    display.count(2)
    display.show(record(step=2))
    assert capsys.readouterr().out == "step 2 · epoch 1 · loss 0.1235 · 64,000 rows/s · wait 25%\n"


Terminal = Callable[[Callable[[], None]], bytes]


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Terminal]:
    """Run a function with stdout on a pseudo-terminal of 80 columns; returns the output."""
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    monkeypatch.setenv("TERM", "xterm-256color")
    for name in ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    printed = bytearray()

    def read() -> None:
        while True:
            try:
                printed.extend(os.read(leader, 4096))
            except OSError:  # the other end is closed
                return

    def run(function: Callable[[], None]) -> bytes:
        reader = threading.Thread(target=read)
        reader.start()
        with os.fdopen(follower, "w", encoding="utf-8") as stream, monkeypatch.context() as patch:
            # Rich reads the size from the descriptors of the standard streams: give it this one.
            patch.setattr(sys, "stdout", stream)
            patch.setattr(sys, "__stdout__", stream)
            patch.setattr(sys, "__stderr__", stream)
            patch.setattr(sys, "__stdin__", stream)
            function()
        reader.join()
        return bytes(printed)

    yield run
    os.close(leader)


def screen(printed: bytes, columns: int = 80) -> tuple[list[str], list[str]]:
    """Return the final contents of a terminal, and every line that was ever on it."""
    lines, row, column, ever = [""], 0, 0, set()
    text = printed.decode()
    at = 0
    while at < len(text):
        char = text[at]
        if char == "\x1b":
            end = at + 2
            while not text[end].isalpha():
                end += 1
            number = text[at + 2 : end]
            if text[end] == "A":
                row = max(row - int(number or 1), 0)
            elif text[end] == "K":
                ever.add(lines[row])
                lines[row] = "" if number == "2" else lines[row][:column]
            at = end
        elif char == "\r":
            column = 0
        elif char == "\n":
            ever.add(lines[row])
            row += 1
            lines += [""] * (row + 1 - len(lines))
        else:
            if column == columns:
                row, column = row + 1, 0
                lines += [""] * (row + 1 - len(lines))
            lines[row] = lines[row].ljust(column)[:column] + char + lines[row][column + 1 :]
            column += 1
        at += 1
    return [line.rstrip() for line in lines], sorted(line.rstrip() for line in ever)


def test_on_a_terminal_the_live_line_fits_and_goes_away(terminal: Terminal) -> None:
    total = 12_345
    long = "epoch 1 " + "with a long line " * 8

    def show() -> None:
        display = open_progress(True, total)
        display.line("epoch  60,000 rows in 235 batches, the last with 96 rows and 160 of padding")
        display.status("compiling the step")
        for step in (1, 6_000, total):
            display.count(step)
            display.show(record(step))
        display.line(long)
        display.line("params ['w'] and [bold]")
        display.close()

    end, ever = screen(terminal(show))
    kept = [line for line in end if line]
    assert kept[0].startswith("epoch  60,000 rows")
    assert len(kept[1]) > 40
    assert kept[1] == long[: len(kept[1])].rstrip()
    assert kept[-1] == "params ['w'] and [bold]"
    assert not [line for line in kept if "━" in line or "/12345" in line]
    live = [line for line in ever if "12345" in line]
    assert live
    assert [line for line in live if "epoch 1 · loss 0.1235 · 64,000 rows/s · wait 25%" in line]
    assert all("━" in line and len(line) == 80 for line in live)


def test_an_unknown_total_shows_no_fraction(terminal: Terminal) -> None:
    def show() -> None:
        display = open_progress(True, None)
        display.count(7)
        display.show(record(7))
        display.close()

    _, ever = screen(terminal(show))
    (live,) = {line for line in ever if "loss 0.1235" in line}
    assert "7" in live


def test_without_rich_a_terminal_gets_plain_lines(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "rich.console", None)

    def show() -> None:
        display = open_progress(True, 3)
        assert isinstance(display, PlainProgress)
        display.line("a line")

    assert screen(terminal(show))[0][0] == "a line"


class Page:
    """A fake IPython: the outputs of a cell, each with all that it has shown."""

    def __init__(self, kernel: object) -> None:
        self.outputs: list[list[str]] = []
        self.html: list[str] = []
        self.kernel = kernel

    def get_ipython(self) -> "Page":
        return self

    def display(self, data: dict[str, str], *, raw: bool, display_id: bool) -> "Output":
        assert raw
        assert display_id
        self.outputs.append([data["text/plain"]])
        self.html.append(data["text/html"])
        return Output(self.outputs[-1], self.html)


@dataclasses.dataclass
class Output:
    """The handle that `display` returns."""

    texts: list[str]
    html: list[str]

    def update(self, data: dict[str, str], *, raw: bool) -> None:
        assert raw
        self.texts.append(data["text/plain"])
        self.html.append(data["text/html"])


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch) -> Page:
    page = Page(kernel=object())
    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(get_ipython=lambda: page))
    monkeypatch.setitem(sys.modules, "IPython.display", page)
    return page


def test_in_a_notebook_one_output_changes_and_nothing_is_printed(
    page: Page, clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    display = open_progress(True, 10)
    display.line("batch  64 rows")
    display.status("compiling <the> step")
    for step in range(1, 11):
        display.count(step)
        display.show(record(step))
        clock.now += 0.2
    display.line("epoch 1/1")
    display.close()
    shown = "epoch 1 · loss 0.1235 · 64,000 rows/s · wait 25%"
    (output,) = page.outputs
    assert [text.splitlines() for text in output] == [
        ["batch  64 rows"],
        ["compiling <the> step", "batch  64 rows"],
        [f"step 4/10 · {shown} · 1.2 s left", "batch  64 rows"],  # 3 steps took 0.6 s
        [f"step 7/10 · {shown} · 0.6 s left", "batch  64 rows"],
        [f"step 10/10 · {shown} · 0.0 s left", "batch  64 rows"],
        ["batch  64 rows", "epoch 1/1"],
    ]
    assert "compiling &lt;the&gt; step" in page.html[1]
    assert ['value="4" max="10"' in html for html in page.html] == [False] * 2 + [True] + [
        False
    ] * 3
    assert capsys.readouterr().out == ""


def test_in_a_notebook_a_hundred_epochs_are_a_curve_and_the_newest_lines(
    page: Page, clock: Clock
) -> None:
    display = open_progress(True, 100)
    run: Any = types.SimpleNamespace(records=[], epochs=100)
    display.start(run)
    display.line("batch  64 rows")
    for epoch in range(100):
        display.count(epoch + 1)
        run.records.append(Record("train", epoch + 1, epoch, {"loss": 5.0 - epoch / 20}, 64, 0.1))
        display.line(f"epoch {epoch + 1}/100")
        clock.now += 1.0
    display.close()
    batch, left_out, *newest = page.outputs[0][-1].splitlines()
    assert (batch, numbers(left_out)) == ("batch  64 rows", ["88"])
    assert newest == [f"epoch {epoch}/100" for epoch in range(89, 101)]
    assert page.html[-1].count("<svg") == 1
    assert all(len(html) < 8_000 for html in page.html)


def test_in_a_notebook_a_run_that_ends_early_says_where(page: Page) -> None:
    display = open_progress(True, 10)
    display.count(4)
    display.close()
    assert page.outputs[0][-1] == "step 4/10"
    assert 'value="4" max="10"' in page.html[-1]


def test_an_update_that_is_slow_delays_the_next(page: Page, clock: Clock) -> None:
    class Slow(list[Record]):
        def __iter__(self) -> Iterator[Record]:
            clock.now += 0.1
            return super().__iter__()

    display = open_progress(True, 1000)
    display.start(types.SimpleNamespace(records=Slow([record()])))  # type: ignore[arg-type]
    for step in range(1000):
        display.count(step)
        clock.now += 0.1
    assert 1 < len(page.html) <= 12  # 1% of 100 s


def test_a_run_in_a_notebook_that_shows_nothing_has_no_output(page: Page) -> None:
    open_progress(True, 10).close()
    assert type(open_progress(False, 10)) is Progress
    page.kernel = None  # IPython on a terminal
    assert type(open_progress(True, 10)) is PlainProgress
    assert page.outputs == []


def test_a_skipped_step_and_an_evaluation_within_an_epoch_are_lines() -> None:
    told: list[str] = []
    shown: Any = Progress()
    shown.line, run = told.append, types.SimpleNamespace()
    shown.evaluation(run, Record("eval", 2, 1, {"loss": 0.25, "accuracy": 0.5}, 64, 0.1))
    shown.before_step(run, None)
    shown.record(run, Record("skip", 3, 1, {"loss": math.nan}, 4, 0.0, examples=(7, 8)))
    evaluated, skipped = told
    assert evaluated == "eval   step 2: loss 0.25 accuracy 0.5"
    assert numbers(skipped) == ["3", "7", "8"]
    assert skipped.startswith("skip   step 3: ")
