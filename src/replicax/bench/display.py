"""What a measurement shows while it goes: a live line on a terminal, plain lines elsewhere."""

import sys
import time
from typing import Any

from replicax.wording import duration


class Display:
    """One line at a time, with an estimate of what is left."""

    def __init__(self, shown: bool, cases: int, rounds: int) -> None:
        self._shown, self._cases, self._rounds = shown, cases, rounds
        self._started = time.monotonic()
        self._live: Any = _live() if shown and sys.stdout.isatty() else None

    def compiling(self, number: int, case: object, run_seconds: float) -> None:
        """Case `number`, counted from 0, is next; a run of those before takes `run_seconds`."""
        left = ""
        if number:
            each = (time.monotonic() - self._started) / number
            rounds = run_seconds / number * self._cases * self._rounds
            left = f" · about {duration(each * (self._cases - number) + rounds)} left"
        self._show(f"compiling {number + 1}/{self._cases}: {case}{left}")

    def round(self, number: int, run_seconds: float) -> None:
        """Round `number`, counted from 0, is next; a run of all cases takes `run_seconds`."""
        seconds = run_seconds * (self._rounds - number)
        self._show(f"round {number + 1}/{self._rounds} · about {duration(seconds)} left")

    def part(self, number: int, parts: int, text: str) -> None:
        """Part `number` of `parts` that take as long as each other, counted from 0, is next."""
        left = ""
        if number:
            each = (time.monotonic() - self._started) / number
            left = f" · about {duration(each * (parts - number))} left"
        self._show(f"{text}{left}")

    def close(self) -> None:
        """The end; the live line goes."""
        if self._live is not None:
            self._live.stop()

    def _show(self, text: str) -> None:
        if self._live is not None:
            self._live.update(text)
        elif self._shown:
            print(text, flush=True)


def _live() -> Any:
    """A started rich line; None where rich is not installed."""
    try:
        from rich.console import Console
    except ImportError:
        return None
    # Each refresh takes a little of the processor that is being measured.
    status = Console(highlight=False).status("", spinner="dots", refresh_per_second=2)
    status.start()
    return status
