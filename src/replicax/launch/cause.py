"""Find the process that failed first, its cause, and whether a restart may help."""

import dataclasses
import json
import re
import signal
from collections import deque
from collections.abc import Iterable, Sequence
from pathlib import Path

from replicax.cluster.watchdog import SAVED
from replicax.text.wording import shortened

MOST_CHARACTERS = 600
SAME_IN_A_ROW = 3
FIRST_SECONDS = 10.0
USAGE = 2
"""The exit code of a wrong flag or configuration."""
# Parts that differ between two runs of the same error: addresses, ids, ports, counts, times.
_INCIDENTAL = re.compile(r"0x[0-9a-fA-F]+|\b[0-9a-f]{8,}\b|\d+")
_ERROR = re.compile(r"[A-Za-z_][\w.]*(Error|Exception|Interrupt|Exit|Warning|Group)(:.*)?")
_TRACEBACK = "Traceback (most recent call last):"
_OWN = "replicax: "


@dataclasses.dataclass(frozen=True)
class FailureReport:
    """A process's own failure report; see `replicax.cluster.variables.FAILURE_FILE`."""

    time: float
    error: str
    step: int | None
    blames: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Ended:
    """How a process ended."""

    status: int
    """Exit code, or the negative number of the signal that ended it."""
    time: float
    forced: bool
    """Whether the launcher had already told it to end."""
    report: FailureReport | None
    errors: Sequence[str]
    """The last lines of its standard error."""
    log: Path | None
    """The file of its output; None if its engine keeps it."""

    @property
    def exit_code(self) -> int:
        """Exit code as in a shell: 128 plus the number for a signal."""
        return self.status if self.status >= 0 else 128 - self.status

    @property
    def well(self) -> bool:
        """Whether it ended normally: done, or stopped early with everything saved."""
        return self.status in (0, SAVED)

    @property
    def fell_silently(self) -> bool:
        """Whether it failed by itself and without a report."""
        return not (self.report or self.well or self.forced)

    @property
    def how(self) -> str:
        """Cause of its end: from its output, or else from its exit status."""
        said = _said_of_failure(self.errors)
        if said and (self.status >= 0 or self.status == -signal.SIGABRT):
            return said
        if self.status < 0:
            hint = " (out of memory?)" if self.status == -signal.SIGKILL else ""
            return f"killed by {posix_signal_name(-self.status)}{hint}"
        last = next((line for line in reversed(self.errors) if line.strip()), "")
        return f"exit code {self.status}" + (f" ({last.strip()})" if last else "")


@dataclasses.dataclass(frozen=True)
class Failure:
    """The process of a job that failed first."""

    process: int
    cause: str
    exit_code: int
    """Exit code of the job, as in a shell."""
    step: int | None
    """The last finished step, if reported."""
    log: Path | None

    @property
    def see(self) -> str:
        """` (see FILE)`; nothing if its engine keeps the output."""
        return f" (see {self.log})" if self.log else ""

    def __str__(self) -> str:
        return f"process {self.process} failed first: {self.cause}{self.see}"


class Restarts:
    """Counts restarts and detects crash loops.

    Failures are the same if the process and the message, without its numbers, are: three in a row
    at the same step, or within the first seconds of each attempt, are a crash loop.
    """

    def __init__(self, restarts: int) -> None:
        self._left = self._total = restarts
        self._last: deque[tuple[int, str, int | None, bool]] = deque(maxlen=SAME_IN_A_ROW)

    def refused(self, failure: Failure | None, seconds: float) -> str | None:
        """Return why the job is not restarted ("" if restarts are off); None if it is.

        `failure` is None if this attempt, which took `seconds`, stopped early with all saved.
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
        if len(self._last) == SAME_IN_A_ROW and len({last[:2] for last in self._last}) == 1:
            steps = {step for _, _, step, _ in self._last}
            all_at_once = all(at_once for _, _, _, at_once in self._last)
            if (len(steps) == 1 and None not in steps) or all_at_once:
                return f"the same failure {SAME_IN_A_ROW} times in a row: a restart will not help"
        if self._left == 0:
            return f"all {self._total} restarts are used up"
        self._left -= 1
        return None

    @property
    def progress(self) -> str:
        """`restart 1 of 3`, for the next attempt."""
        return f"restart {self._total - self._left} of {self._total}"


def read_report(path: Path) -> FailureReport | None:
    """Return the report of a process; None if it is missing or malformed."""
    try:
        fields = json.loads(path.read_bytes())
        return FailureReport(
            time=float(fields["time"]),
            error=_one_line(str(fields["error"])),
            step=None if fields.get("step") is None else int(fields["step"]),
            blames=tuple(int(each) for each in fields.get("blames") or ()),
        )
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


def first_failure(processes: Sequence[Ended]) -> Failure | None:
    """Return the process that failed by itself before all others, or None if none failed.

    This is the earliest process that reports a failure of its own, unless another died without a
    report before it. If all reports blame other processes, it is the one they blame.
    """
    reported = [(number, each.report) for number, each in enumerate(processes) if each.report]
    reports = dict(sorted(reported, key=lambda pair: pair[1].time))
    first = next((number for number, each in reports.items() if not each.blames), None)
    silent = _first_silent(processes, range(len(processes)))
    if first is not None and (silent is None or reports[first].time <= processes[silent].time):
        return _failure(processes, first, reports[first].error, reports[first].step)
    if first is None and reports:
        return _blamed(processes, reports)
    return None if silent is None else _failure(processes, silent, processes[silent].how)


def _first_silent(processes: Sequence[Ended], among: Iterable[int]) -> int | None:
    silent = [number for number in among if processes[number].fell_silently]
    return min(silent, key=lambda number: processes[number].time, default=None)


def _blamed(processes: Sequence[Ended], reports: dict[int, FailureReport]) -> Failure:
    """Return the first failure among the blamed processes. `reports` are in order of time."""
    step = min((each.step for each in reports.values() if each.step is not None), default=None)
    order = [n for each in reports.values() for n in each.blames if 0 <= n < len(processes)]
    silent = _first_silent(processes, order)
    if silent is not None:
        end = processes[silent]
        blaming = next(each for each in reports.values() if silent in each.blames)
        # JAX aborts a process whose job has ended: then the cause is the reason to end it.
        aborted = end.status == -signal.SIGABRT and end.time > blaming.time
        return _failure(processes, silent, blaming.error if aborted else end.how, step)
    number = next((number for number in order if processes[number].report is None), None)
    if number is None:  # such as a process that stalled and was notified
        first, report = next(iter(reports.items()))
        return _failure(processes, order[0] if order else first, report.error, step)
    end, words = processes[number], next(r.error for r in reports.values() if number in r.blames)
    how = "made no progress" if end.forced else f"ended early, exit code {end.status}"
    return _failure(processes, number, f"it {how} ({words})", step)


def _failure(
    processes: Sequence[Ended], number: int, cause: str, step: int | None = None
) -> Failure:
    end = processes[number]
    # The exit code of a process that was forced to end says nothing of the failure.
    exit_code = 1 if end.forced or end.well else end.exit_code
    return Failure(number, _one_line(cause), exit_code, step, end.log)


def _said_of_failure(errors: Sequence[str]) -> str | None:
    """Return a failed program's error: its `replicax:` line, or the end of a traceback."""
    for line in reversed(errors):
        if line.startswith(_OWN):
            return line.removeprefix(_OWN).strip()
    starts = [number for number, line in enumerate(errors) if line.endswith(_TRACEBACK)]
    for line in errors[starts[-1] + 1 :] if starts else []:
        if line.strip() and not line[0].isspace() and not line.startswith("|"):
            return line.strip()
    for line in reversed(errors):  # a SyntaxError has no traceback header
        if _ERROR.fullmatch(line.strip()):
            return line.strip()
    return None


def posix_signal_name(number: int) -> str:
    """Return `SIGKILL` for 9."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _one_line(text: str) -> str:
    return shortened(" ".join(text.split()), MOST_CHARACTERS)
