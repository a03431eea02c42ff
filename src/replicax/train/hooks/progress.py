"""The progress display of a run: a live line if possible, else plain lines."""

import importlib
import json
import math
import sys
import time
from typing import Any

from replicax.text.blocks import Bar, Paragraph, ReportBlock, Verbatim, html_of
from replicax.text.streams import JsonLines, Unfailing
from replicax.text.table import for_stream
from replicax.text.wording import counted, duration
from replicax.train.dispatched import Dispatched
from replicax.train.files.records import Record
from replicax.train.hooks.hook import Hook, Running
from replicax.train.hooks.loss_curve import LossCurve
from replicax.train.hooks.record_lines import epoch_line, eval_line, skip_line

SECONDS_BETWEEN_LINES = 10.0
SECONDS_BETWEEN_UPDATES = 0.5
"""Applies in a notebook, where the browser redraws the page."""
MOST_OF_THE_TIME = 0.01
"""Share of the time that updates in a notebook may take; a slow one delays the next."""
NEWEST_LINES = 12


class Progress(Hook):
    """Base class of progress displays, which shows nothing. Its owner must close it."""

    name = "Progress"
    interval = None
    _evaluation: Record | None = None
    """An evaluation not shown yet; if the epoch ends here, the epoch's line includes it."""

    def line(self, text: str) -> None:
        """Show a permanent line."""

    def status(self, text: str) -> None:
        """Show the current activity before the first step."""

    def count(self, step: int) -> None:
        """Show that a step was dispatched."""

    def show(self, record: Record) -> None:
        """Show new figures in the live line."""

    def close(self) -> None:
        """Close the display."""

    def before_step(self, run: Running, batch: Any) -> None:
        if self._evaluation is not None:
            self.line(eval_line(self._evaluation))
            self._evaluation = None

    def dispatched(self, run: Running, step: Dispatched) -> None:
        self.count(step.place.step)

    def record(self, run: Running, record: Record) -> None:
        if record.kind == "train":
            self.show(record)
        if record.kind == "skip":
            self.line(skip_line(record))

    def evaluation(self, run: Running, record: Record) -> None:
        self._evaluation = record

    def epoch(self, run: Running, record: Record | None) -> None:
        at, record, self._evaluation = run.place, self._evaluation, None
        trained = [r for r in run.records if r.kind == "train" and r.epoch == at.epoch]
        self.line(epoch_line(at.epoch, run.epochs, at.step, trained, record))


def open_progress(shown: bool, total_steps: int | None) -> Progress:
    """Open the display for standard output: live in a notebook or with rich, else plain."""
    if not shown:
        return Progress()
    if _in_notebook():
        return NotebookProgress(total_steps, Unfailing(sys.stdout))
    if isinstance(sys.stdout, JsonLines):
        return JsonProgress(sys.stdout)
    out = Unfailing(sys.stdout)
    if out.isatty():
        try:
            return LiveProgress(total_steps, out)
        except ImportError:  # rich is in an extra
            pass
    return PlainProgress(total_steps, out)


class JsonProgress(Progress):
    """Write lines, and all records with their fields, as JSON."""

    def __init__(self, out: JsonLines) -> None:
        self._out = out

    def line(self, text: str) -> None:
        self._out.put(line=text)

    status = line

    def record(self, run: Running, record: Record) -> None:
        super().record(run, record)
        self._out.put(record=json.loads(record.to_json()), steps=run.total)


class PlainProgress(Progress):
    """Print lines, and the newest figures every `SECONDS_BETWEEN_LINES`."""

    def __init__(self, total_steps: int | None, out: Unfailing) -> None:
        self._total, self._out = total_steps, out
        self._last = time.monotonic()
        self._step = self._first = 0
        self._started: float | None = None

    def line(self, text: str) -> None:
        self._last = time.monotonic()
        print(for_stream(text, self._out), file=self._out, flush=True)

    def status(self, text: str) -> None:
        print(text, file=self._out, flush=True)

    def count(self, step: int) -> None:
        if self._started is None:
            self._started, self._first = time.monotonic(), step
        self._step = step
        if self._total and step > self._total:  # a loader that told of too few
            self._total = None

    def show(self, record: Record) -> None:
        if time.monotonic() - self._last >= SECONDS_BETWEEN_LINES:
            self.line(f"{self._counted(record.step)} · {figures(record)}{self._left()}")

    def _counted(self, step: int) -> str:
        return f"step {step}/{self._total}" if self._total else f"step {step}"

    def _left(self) -> str:
        done = self._step - self._first
        if not self._total or not done or self._started is None:
            return ""
        seconds = (time.monotonic() - self._started) / done * (self._total - self._step)
        return f" · {duration(seconds)} left"


class NotebookProgress(PlainProgress):
    """One output that replaces itself: a bar, the newest figures, the loss, and the newest lines.

    A million epochs take no more room than a few; what stays is the curve and how the run ended.
    """

    def __init__(self, total_steps: int | None, out: Unfailing) -> None:
        super().__init__(total_steps, out)
        self._handle: Any = None
        self._figures, self._next = "", -math.inf
        self._lines: list[str] = []
        """Lines before the first step, which say how the run is made, and the newest after it."""
        self._kept: int | None = None
        self._left_out = 0
        self._run: Running | None = None

    def start(self, run: Running) -> None:
        self._run = run

    def line(self, text: str) -> None:
        self._lines.append(text)
        if self._kept is not None and len(self._lines) > self._kept + NEWEST_LINES:
            del self._lines[self._kept]
            self._left_out += 1
        self._show()

    def status(self, text: str) -> None:
        self._figures = text
        self._show(now=True)

    def count(self, step: int) -> None:
        super().count(step)
        if self._kept is None:
            self._kept, self._figures = len(self._lines), ""
        self._show()

    def show(self, record: Record) -> None:
        self._figures = figures(record)

    def close(self) -> None:
        self._figures = "" if self._step == self._total else self._figures
        self._show(now=True, closing=True)

    def _show(self, *, now: bool = False, closing: bool = False) -> None:
        """Update the output, if that is due: what it takes is a small part of the time."""
        began = time.monotonic()
        if not now and began < self._next:
            return
        done = closing and self._step == self._total
        place = [self._counted(self._step)] if self._started is not None and not done else []
        head = " · ".join(filter(None, [*place, self._figures]))
        head += "" if closing else self._left()
        lines = list(self._lines)
        if self._left_out:
            lines.insert(self._kept or 0, f"... {counted(self._left_out, 'line')} before these")
        if not (head or lines):
            return
        shown: list[ReportBlock] = [*([Paragraph(head)] if head else [])]
        if self._total and place:
            shown.append(Bar(self._step, self._total))
        if self._run is not None:
            shown.append(LossCurve(self._run.records))
        shown.append(Verbatim(lines))
        content = {
            "text/html": html_of(shown),
            "text/plain": "\n".join(line for part in shown for line in part.lines()),
        }
        if self._handle is None:
            display = importlib.import_module("IPython.display").display
            self._handle = display(content, raw=True, display_id=True)
        else:
            self._handle.update(content, raw=True)
        took = time.monotonic() - began
        self._next = began + max(SECONDS_BETWEEN_UPDATES, took / MOST_OF_THE_TIME)


class LiveProgress(Progress):
    """A bar with the newest figures, redrawn in place by rich."""

    def __init__(self, total_steps: int | None, out: Any) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar
        from rich.table import Column

        width = 2 * len(str(total_steps)) + 1  # on narrow terminals, the bar shrinks
        self._out = out
        self._bar: Any = Bar(
            MofNCompleteColumn(table_column=Column(min_width=width)),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[figures]}"),
            TimeRemainingColumn(compact=True, elapsed_when_finished=True),
            console=Console(file=out, highlight=False),
            redirect_stderr=sys.stderr is not None and sys.stderr.isatty(),
            transient=True,
            expand=True,
        )
        self._task = self._bar.add_task("steps", total=total_steps, figures="")
        self._bar.start()

    def line(self, text: str) -> None:
        self._bar.console.print(for_stream(text, self._out), markup=False, soft_wrap=True)

    def status(self, text: str) -> None:
        self._bar.update(self._task, figures=text)

    def count(self, step: int) -> None:
        self._bar.update(self._task, completed=step)

    def show(self, record: Record) -> None:
        self._bar.update(self._task, figures=figures(record))

    def close(self) -> None:
        self._bar.stop()


def _in_notebook() -> bool:
    """Whether this runs in a Jupyter kernel; IPython on a terminal has none."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return getattr(shell, "kernel", None) is not None


def figures(record: Record) -> str:
    """Format the figures of a train record on one line; "wait" is the input wait fraction."""
    parts = [f"epoch {record.epoch + 1}", f"loss {record.metrics['loss']:.4g}"]
    if record.seconds > 0:
        parts.append(f"{record.rows_per_second:,.0f} rows/s")
    if record.input_wait_fraction is not None:
        parts.append(f"wait {record.input_wait_fraction:.0%}")
    return " · ".join(parts)
