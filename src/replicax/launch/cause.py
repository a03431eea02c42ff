"""Which process failed first, and of what."""

import dataclasses
import json
import re
import signal
from collections.abc import Sequence
from pathlib import Path

from replicax.launch.process import End

MOST_CHARACTERS = 600
_ERROR = re.compile(r"[A-Za-z_][\w.]*(Error|Exception|Interrupt|Exit|Warning|Group)(:.*)?")
_TRACEBACK = "Traceback (most recent call last):"
_OWN = "replicax: "


@dataclasses.dataclass(frozen=True)
class Report:
    """What a process wrote of its failure; see `replicax.cluster.variables.FAILURE_FILE`."""

    process: int
    time: float
    error: str
    step: int | None
    blames: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Failure:
    """The first failure of a job.

    Args:
        process: that failed.
        cause: in a few words.
        exit_code: what the job ends with, as a shell counts.
        step: the last one that was finished, where the process told.
        log: what it wrote.
    """

    process: int
    cause: str
    exit_code: int
    step: int | None
    log: Path

    def __str__(self) -> str:
        return f"process {self.process} failed first: {self.cause} (see {self.log})"


@dataclasses.dataclass(frozen=True)
class Ended:
    """What is known of a process that has ended.

    Args:
        end: how.
        report: of its failure, if it left one.
        errors: the last lines of its standard error.
        log: what it wrote.
    """

    end: End
    report: Report | None
    errors: Sequence[str]
    log: Path


def read_report(path: Path, process: int) -> Report | None:
    """The report of `process`; None where there is none, or none that makes sense."""
    try:
        told = json.loads(path.read_bytes())
        return Report(
            process=process,
            time=float(told["time"]),
            error=_one_line(str(told["error"])),
            step=None if told.get("step") is None else int(told["step"]),
            blames=tuple(int(each) for each in told.get("blames") or ()),
        )
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


def first_failure(processes: Sequence[Ended]) -> Failure | None:
    """The process that failed of itself before all others, or None where none failed.

    A process that reports a failure of its own is believed, the earliest first; one that died
    before that without a word comes before it. Where those that report only blame another, it is
    the one they blame.
    """
    reports = [each.report for each in processes if each.report]
    own = min((each for each in reports if not each.blames), key=_time, default=None)
    silent = _first_silent(processes)
    if own and (silent is None or own.time <= processes[silent].end.time):
        return _failure(processes, own.process, own.error, own.step)
    blaming = [each for each in reports if each.blames]
    if own is None and blaming:
        return _blamed(processes, sorted(blaming, key=_time))
    if silent is None:
        return None
    return _failure(processes, silent, _how_it_ended(processes[silent]))


def _first_silent(processes: Sequence[Ended], among: Sequence[int] | None = None) -> int | None:
    """The process that ended badly before all others, of itself and without a report."""
    numbers = [
        number
        for number, each in enumerate(processes)
        if not (each.report or each.end.well or each.end.forced)
        and (among is None or number in among)
    ]
    return min(numbers, key=lambda number: processes[number].end.time, default=None)


def _blamed(processes: Sequence[Ended], reports: Sequence[Report]) -> Failure:
    """Of those that others blame, the one that failed first."""
    steps = [each.step for each in reports if each.step is not None]
    step = min(steps, default=None)
    blamed = [number for each in reports for number in each.blames if 0 <= number < len(processes)]
    silent = _first_silent(processes, blamed)
    if silent is not None:
        return _failure(processes, silent, _how_it_ended(processes[silent]), step)
    without_word = [number for number in blamed if processes[number].report is None]
    if not without_word:  # such as one that stood still and was told so
        first = reports[0]
        number = blamed[0] if blamed else first.process
        return _failure(processes, number, first.error, step)
    number = without_word[0]
    words = next(each.error for each in reports if number in each.blames)
    end = processes[number].end
    if end.forced:
        return _failure(processes, number, f"it made no progress ({words})", step)
    return _failure(processes, number, f"it ended early, exit code {end.status} ({words})", step)


def _failure(
    processes: Sequence[Ended], number: int, cause: str, step: int | None = None
) -> Failure:
    end = processes[number].end
    # Nothing of its own is in the code of a process that was made to end.
    exit_code = 1 if end.forced or end.well else end.exit_code
    return Failure(number, _one_line(cause), exit_code, step, processes[number].log)


def _how_it_ended(process: Ended) -> str:
    end = process.end
    said = said_of_failure(process.errors)
    if said and (end.status >= 0 or end.status == -signal.SIGABRT):
        return said
    if end.status < 0:
        hint = " (out of memory?)" if end.status == -signal.SIGKILL else ""
        return f"killed by {signal_name(-end.status)}{hint}"
    last = next((line for line in reversed(process.errors) if line.strip()), "")
    return f"exit code {end.status}" + (f" ({last.strip()})" if last else "")


def said_of_failure(errors: Sequence[str]) -> str | None:
    """What a program said as it failed: its `replicax:` line, or the end of a Python traceback."""
    for line in reversed(errors):
        if line.startswith(_OWN):
            return line.removeprefix(_OWN).strip()
    starts = [number for number, line in enumerate(errors) if line.endswith(_TRACEBACK)]
    for line in errors[starts[-1] + 1 :] if starts else []:
        if line.strip() and not line[0].isspace() and not line.startswith("|"):
            return line.strip()
    for line in reversed(errors):  # a SyntaxError has no first line
        if _ERROR.fullmatch(line.strip()):
            return line.strip()
    return None


def signal_name(number: int) -> str:
    """`SIGKILL` for 9."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _time(report: Report) -> float:
    return report.time


def _one_line(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= MOST_CHARACTERS else f"{line[:MOST_CHARACTERS]}…"
