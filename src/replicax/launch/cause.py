"""Which process failed first, of what, and whether another start may cure it."""

import dataclasses
import json
import re
import signal
from collections import deque
from collections.abc import Iterable, Sequence
from pathlib import Path

from replicax.cluster.verdict import SAVED
from replicax.wording import shortened

MOST_CHARACTERS = 600
SAME_IN_A_ROW = 3
FIRST_SECONDS = 10.0
USAGE = 2
"""The exit code of a wrong flag or configuration."""
# What differs between two runs of one mistake: addresses, ids, ports, process ids, counts, times.
_INCIDENTAL = re.compile(r"0x[0-9a-fA-F]+|\b[0-9a-f]{8,}\b|\d+")
_ERROR = re.compile(r"[A-Za-z_][\w.]*(Error|Exception|Interrupt|Exit|Warning|Group)(:.*)?")
_TRACEBACK = "Traceback (most recent call last):"
_OWN = "replicax: "


@dataclasses.dataclass(frozen=True)
class FailureReport:
    """A process's own account of its failure; see `replicax.cluster.variables.FAILURE_FILE`."""

    time: float
    error: str
    step: int | None
    blames: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Ended:
    """Facts about a process that has ended."""

    status: int
    """Its exit code; a signal's number, negative, where one ended it."""
    time: float
    forced: bool
    """The launcher had told it to end before it did."""
    report: FailureReport | None
    errors: Sequence[str]
    """The last lines of its standard error."""
    log: Path

    @property
    def exit_code(self) -> int:
        """Exit code as a shell counts: 128 and the signal's number for a signal."""
        return self.status if self.status >= 0 else 128 - self.status

    @property
    def well(self) -> bool:
        """Whether it did what it should: it is done, or stopped with everything saved."""
        return self.status in (0, SAVED)

    @property
    def fell_silently(self) -> bool:
        """Whether it ended badly, of itself and without a report."""
        return not (self.report or self.well or self.forced)

    @property
    def how(self) -> str:
        """How it ended: its own words, or what the system says."""
        said = _said_of_failure(self.errors)
        if said and (self.status >= 0 or self.status == -signal.SIGABRT):
            return said
        if self.status < 0:
            hint = " (out of memory?)" if self.status == -signal.SIGKILL else ""
            return f"killed by {signal_name(-self.status)}{hint}"
        last = next((line for line in reversed(self.errors) if line.strip()), "")
        return f"exit code {self.status}" + (f" ({last.strip()})" if last else "")


@dataclasses.dataclass(frozen=True)
class Failure:
    """The process of a job that failed first."""

    process: int
    cause: str
    exit_code: int
    """Exit code of the job, as a shell counts."""
    step: int | None
    """The last one that was finished, where the process told."""
    log: Path

    def __str__(self) -> str:
        return f"process {self.process} failed first: {self.cause} (see {self.log})"


class Restarts:
    """Counts starts, and knows a crash loop.

    The same failure is the same process with the same words, numbers aside: three in a row at the
    same step, or within the first seconds of each start, mean that a restart will not help.
    """

    def __init__(self, restarts: int) -> None:
        self._left = self._total = restarts
        self._last: deque[tuple[int, str, int | None, bool]] = deque(maxlen=SAME_IN_A_ROW)

    def refused(self, failure: Failure | None, seconds: float) -> str | None:
        """Why all is not started again, empty if no restart was asked for; None where it is.

        `failure` is None where this start, which took `seconds`, ended with everything saved.
        """
        if failure is None:
            self._last.clear()
        else:
            words, at_once = _INCIDENTAL.sub("#", failure.cause), seconds < FIRST_SECONDS
            self._last.append((failure.process, words, failure.step, at_once))
        if self._total == 0:
            return ""
        if failure and failure.exit_code == USAGE:
            return "exit code 2 is a wrong flag or configuration: a restart will not help"
        if len(self._last) == SAME_IN_A_ROW and len({each[:2] for each in self._last}) == 1:
            steps = {step for _, _, step, _ in self._last}
            if (len(steps) == 1 and None not in steps) or all(each[3] for each in self._last):
                return f"the same failure {SAME_IN_A_ROW} times in a row: a restart will not help"
        if self._left == 0:
            return f"all {self._total} restarts are used up"
        self._left -= 1
        return None

    @property
    def progress(self) -> str:
        """`restart 1 of 3`, of the start that comes now."""
        return f"restart {self._total - self._left} of {self._total}"


def read_report(path: Path) -> FailureReport | None:
    """The report of a process; None where there is none, or none that makes sense."""
    try:
        told = json.loads(path.read_bytes())
        return FailureReport(
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
    found = [(number, each.report) for number, each in enumerate(processes) if each.report]
    reports = dict(sorted(found, key=lambda pair: pair[1].time))
    own = next((number for number, each in reports.items() if not each.blames), None)
    silent = _first_silent(processes, range(len(processes)))
    if own is not None and (silent is None or reports[own].time <= processes[silent].time):
        return _failure(processes, own, reports[own].error, reports[own].step)
    if own is None and reports:
        return _blamed(processes, reports)
    return None if silent is None else _failure(processes, silent, processes[silent].how)


def _first_silent(processes: Sequence[Ended], among: Iterable[int]) -> int | None:
    silent = [number for number in among if processes[number].fell_silently]
    return min(silent, key=lambda number: processes[number].time, default=None)


def _blamed(processes: Sequence[Ended], reports: dict[int, FailureReport]) -> Failure:
    """The first to fail of those that others blame. `reports` are in order of time."""
    step = min((each.step for each in reports.values() if each.step is not None), default=None)
    order = [n for each in reports.values() for n in each.blames if 0 <= n < len(processes)]
    silent = _first_silent(processes, order)
    if silent is not None:
        return _failure(processes, silent, processes[silent].how, step)
    number = next((number for number in order if processes[number].report is None), None)
    if number is None:  # such as one that stood still and was told so
        first, report = next(iter(reports.items()))
        return _failure(processes, order[0] if order else first, report.error, step)
    end, words = processes[number], next(r.error for r in reports.values() if number in r.blames)
    how = "made no progress" if end.forced else f"ended early, exit code {end.status}"
    return _failure(processes, number, f"it {how} ({words})", step)


def _failure(
    processes: Sequence[Ended], number: int, cause: str, step: int | None = None
) -> Failure:
    end = processes[number]
    # Nothing of its own is in the code of a process that was made to end.
    exit_code = 1 if end.forced or end.well else end.exit_code
    return Failure(number, _one_line(cause), exit_code, step, end.log)


def _said_of_failure(errors: Sequence[str]) -> str | None:
    """Return a failed program's own words: its `replicax:` line, or the end of a traceback."""
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


def _one_line(text: str) -> str:
    return shortened(" ".join(text.split()), MOST_CHARACTERS)
