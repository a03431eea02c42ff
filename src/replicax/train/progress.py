"""What a run shows while it goes: a live line on a terminal, plain lines elsewhere."""

import sys
import time
from typing import Any, Protocol

from replicax.train.dispatched import Dispatched
from replicax.train.hook import Hook, Running
from replicax.train.records import Record

SECONDS_BETWEEN_LINES = 10.0


class Progress(Protocol):
    """Where a run reports to."""

    def line(self, text: str) -> None:
        """A line that stays."""

    def status(self, text: str) -> None:
        """What is going on before there is anything to count."""

    def step(self, step: int) -> None:
        """A step was dispatched."""

    def record(self, record: Record) -> None:
        """New figures for the live line."""

    def close(self) -> None:
        """The end."""


def open_progress(shown: bool, total_steps: int | None) -> Progress:
    """The display for standard output: live on a terminal with rich installed, else plain."""
    if not shown:
        return SilentProgress()
    if sys.stdout.isatty():
        try:
            return LiveProgress(total_steps)
        except ImportError:
            pass
    return PlainProgress(total_steps)


class SilentProgress:
    """Shows nothing."""

    def line(self, text: str) -> None: ...
    def status(self, text: str) -> None: ...
    def step(self, step: int) -> None: ...
    def record(self, record: Record) -> None: ...
    def close(self) -> None: ...


class PlainProgress:
    """Prints lines, and the newest figures every `SECONDS_BETWEEN_LINES`."""

    def __init__(self, total_steps: int | None) -> None:
        self._total = total_steps
        self._last = time.monotonic()
        self._step = self._first = 0
        self._started: float | None = None

    def line(self, text: str) -> None:
        self._last = time.monotonic()
        print(text, flush=True)

    def status(self, text: str) -> None:
        print(text, flush=True)

    def step(self, step: int) -> None:
        if self._started is None:
            self._started, self._first = time.monotonic(), step
        self._step = step

    def record(self, record: Record) -> None:
        if time.monotonic() - self._last >= SECONDS_BETWEEN_LINES:
            total = f"/{self._total}" if self._total else ""
            self.line(f"step {record.step}{total} · {figures(record)}{self._left()}")

    def close(self) -> None: ...

    def _left(self) -> str:
        done = self._step - self._first
        if not self._total or not done or self._started is None:
            return ""
        seconds = (time.monotonic() - self._started) / done * (self._total - self._step)
        return f" · {duration(seconds)} left"


class LiveProgress:
    """A bar with the newest figures, redrawn in place by rich."""

    def __init__(self, total_steps: int | None) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar
        from rich.table import Column

        width = 2 * len(str(total_steps)) + 1  # where room is short, the bar gives way
        self._bar: Any = Bar(
            MofNCompleteColumn(table_column=Column(min_width=width)),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[figures]}"),
            TimeRemainingColumn(compact=True, elapsed_when_finished=True),
            console=Console(highlight=False),
            transient=True,
            expand=True,
        )
        self._task = self._bar.add_task("steps", total=total_steps, figures="")
        self._bar.start()

    def line(self, text: str) -> None:
        self._bar.console.print(text, markup=False, soft_wrap=True)

    def status(self, text: str) -> None:
        self._bar.update(self._task, figures=text)

    def step(self, step: int) -> None:
        self._bar.update(self._task, completed=step)

    def record(self, record: Record) -> None:
        self._bar.update(self._task, figures=figures(record))

    def close(self) -> None:
        self._bar.stop()


def figures(record: Record) -> str:
    """The figures of a train record on one line; "wait" is the time spent waiting for input."""
    parts = [f"epoch {record.epoch + 1}", f"loss {record.metrics['loss']:.4g}"]
    if record.seconds > 0:
        parts.append(f"{record.rows_per_second:,.0f} rows/s")
    if record.input_wait_fraction is not None:
        parts.append(f"wait {record.input_wait_fraction:.0%}")
    return " · ".join(parts)


def duration(seconds: float) -> str:
    """Seconds as a person reads them."""
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"


class Shown(Hook):
    """Shows a run on a display."""

    def __init__(self, display: Progress) -> None:
        self._display = display

    def dispatched(self, run: Running, step: Dispatched) -> None:
        """Count it."""
        self._display.step(step.place.step)
