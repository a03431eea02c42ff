"""Run all checks, in the same order in all processes."""

import contextlib
import dataclasses
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from replicax.cluster import watchdog
from replicax.cluster.failure import before_stopping, fail, has_joined, is_collateral
from replicax.cluster.place import Place
from replicax.core.ground.job import Alone, Job
from replicax.doctor import device_checks, joined
from replicax.doctor.between import CLOCKS, DIFFERENCES, check_clocks, check_surroundings
from replicax.doctor.between_islands import ISLANDS_CHECK, check_islands
from replicax.doctor.combined import (
    STYLE,
    checks_or_error,
    combined,
    doctor_summary,
    has_failed,
    worst,
)
from replicax.doctor.device_checks import DEVICES, MESH, REDUCTION
from replicax.doctor.installation import LIMITS, VERSIONS, check_limits, check_versions
from replicax.doctor.joined import COORDINATOR_CHECK, JOINED, PLACE
from replicax.doctor.known_numbers import NUMBERS, check_known_numbers
from replicax.doctor.shared_folders import FOLDER, check_folders
from replicax.islands.island_variables import ISLAND, ISLANDS
from replicax.text.checks import FAIL, PASS, SKIP, Check, Verdict, table_text

PART_SECONDS = 0.5
"""Time for the others to read the reason from process 0, before JAX's runtime aborts them."""
_TOGETHER = (DIFFERENCES, CLOCKS, FOLDER, DEVICES, NUMBERS, MESH, REDUCTION)
_ITS_OUTPUT = "see the output of that process"


@dataclasses.dataclass(kw_only=True, eq=False)
class Examination:
    """Runs the checks of this process; process 0 collects the rows of all.

    Checks of the process itself come first, then those over the processes' connection, and devices
    last, so that a check that hangs or fails there hides no others.
    """

    named_folders: Sequence[str]
    """Folders to check in addition to the default ones."""
    largest_bytes: int
    """Size of the largest all-reduce."""
    timeout_seconds: float
    """Timeout for all processes to join."""
    show: Callable[[str], None]
    """Called with the name of each check before it runs."""
    say: Callable[[str], None]
    """Called with a line of text while waiting."""
    finish: Callable[["Examination"], None]
    """Called once: at the end, or just before another process's failure ends this one."""
    rows: list[Check] = dataclasses.field(default_factory=list)
    place: Place | None = None
    job: Job | None = None
    verdict: Verdict = FAIL
    """Verdict of the whole job, the same in all processes; `FAIL` until it is known."""
    running: str = VERSIONS
    """The current check, or the last one that ran."""
    parted: bool = False
    """Whether a check failed in which the others wait; the exit must then not wait for them."""
    _finishing: threading.Lock = dataclasses.field(default_factory=threading.Lock)

    def __str__(self) -> str:
        return table_text(self.rows, doctor_summary(self.rows), style=STYLE)

    def run(self) -> None:
        """Run the checks, fill `rows`, and finish."""
        self._by_itself()
        self._join()
        if self.job is not None:
            self._in_company(self.job)
        elif not self.parted:
            self._unjoined()
        self._finishing.acquire()  # never released: its holder finishes
        self.finish(self)

    @property
    def is_finishing(self) -> bool:
        """Whether all checks have ended."""
        return self._finishing.locked()

    def terminate(self) -> None:
        """Finish at once because the launcher stops this process, and inform the others."""
        why = "stopped by SIGTERM, which launchers send after a process has failed"
        self._cut_short(why, "see the launcher's output")
        self._part(self.rows)

    def _cut_short(self, why: str, fix: str) -> None:
        """Finish with `why` as the finding of the current check."""
        if not self._finishing.acquire(blocking=False):
            return
        self.rows.append(Check(self.running, "", FAIL, why, fix))
        self._skip_the_rest("not run: the processes had stopped")
        self.finish(self)

    def _by_itself(self) -> None:
        env = os.environ
        self._check(VERSIONS, check_versions)
        self._check(LIMITS, lambda: check_limits(env))
        self._check(PLACE, self._placed)
        self._check(
            COORDINATOR_CHECK,
            lambda: joined.check_coordinator(self.place, self.timeout_seconds, self.say),
        )

        first = self.place is None or self.place.process == 0
        if first and (ISLAND in env or ISLANDS in env):
            self._check(ISLANDS_CHECK, lambda: check_islands(env, self.timeout_seconds, self.say))

    def _placed(self) -> list[Check]:
        rows, self.place = joined.check_place(os.environ)
        return rows

    def _join(self) -> None:
        self._begin(JOINED)
        if self.place is not None and self.place.processes > 1:
            before_stopping(self._stopped)
        on_coordinator = [row for row in self.rows if row.subject == COORDINATOR_CHECK]
        rows, self.job = joined.check_joining(self.place, on_coordinator, self.timeout_seconds)
        self.rows += rows
        if self.job is None:
            self._part(rows)
            if self.parted:
                self._skip_the_rest("not run: the processes have not joined")

    def _in_company(self, job: Job) -> None:
        """Run the checks that need all processes; every process runs all of them, in this order."""
        env = os.environ
        checks: dict[str, Callable[[], Sequence[Check]]] = {
            DIFFERENCES: lambda: check_surroundings(job, env),
            CLOCKS: lambda: check_clocks(job),
            FOLDER: lambda: check_folders(job, self.named_folders),
            DEVICES: lambda: self._shared(job, device_checks.check_attached_devices(env)),
            NUMBERS: lambda: self._shared(job, check_known_numbers()),
            MESH: device_checks.check_default_mesh,
            REDUCTION: lambda: device_checks.check_reduction(job, self.largest_bytes),
        }
        self._begin(JOINED)
        try:
            self.rows = self._shared(job, self.rows)
            for check, function in checks.items():
                self._begin(check)
                devices = [row.verdict for row in self.rows if row.subject == DEVICES]
                if job.processes > 1:
                    self.rows += function()
                elif check in (NUMBERS, MESH, REDUCTION) and PASS not in devices:
                    self.rows.append(Check(check, "", SKIP, "not run: there are no devices"))
                else:
                    self.rows += checks_or_error(check, function)
            self.verdict = job.gather("the doctor's verdict", worst(self.rows))[0]
        except Exception as error:  # the others wait in this check and must be informed
            self.rows.append(has_failed(self.running, error))
            self._part(self.rows[-1:], collateral=is_collateral(error))
            self._skip_the_rest("not run: an earlier check failed and the processes stopped")

    def _unjoined(self) -> None:
        """Run the remaining checks of a process that could not join."""
        why = "not run: the processes have not joined"
        self.rows += [Check(check, "", SKIP, why) for check in (DIFFERENCES, CLOCKS)]
        self._check(FOLDER, lambda: check_folders(Alone(), self.named_folders))
        self._check(DEVICES, lambda: device_checks.check_attached_devices(os.environ))
        self._skip_the_rest(why)

    def _check(self, check: str, function: Callable[[], Sequence[Check]]) -> None:
        self._begin(check)
        self.rows += checks_or_error(check, function)

    def _begin(self, check: str) -> None:
        self.running = check
        if self.job is not None:
            self.job.move()
        self.show(check)

    def _shared(self, job: Job, rows: Sequence[Check]) -> list[Check]:
        """Merge the rows of all processes into one list."""
        fields = [vars(row) for row in rows]
        values: list[list[dict[str, Any]]] = job.gather("the doctor's rows", fields)
        return combined([[Check(**value) for value in values_of] for values_of in values])

    def _part(self, rows: Sequence[Check], *, collateral: bool = False) -> None:
        """Inform the other processes, if any, that this process has failed."""
        self.parted = has_joined()
        if not self.parted:
            return
        problem = next((row for row in rows if row.verdict == FAIL), None)
        text = f"{problem.subject}: {problem.found}" if problem else "the doctor failed"
        verdict = fail(text, collateral=collateral)
        if verdict is not None:
            # The failure here was only a consequence.
            if collateral:
                self.rows.pop()
            self.rows.append(Check(self.running, "", FAIL, verdict.reason, _ITS_OUTPUT))

    def _skip_the_rest(self, why: str) -> None:
        done = {row.subject for row in self.rows}
        self.rows += [Check(check, "", SKIP, why) for check in _TOGETHER if check not in done]

    def _stopped(self, verdict: watchdog.StuckVerdict) -> None:
        with contextlib.suppress(Exception):  # in the thread that ends this process, which it must
            self._cut_short(verdict.reason, _ITS_OUTPUT)
        if self.place is not None and self.place.process == 0:
            time.sleep(PART_SECONDS)
