"""All checks, in an order that all processes share."""

import contextlib
import dataclasses
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from replicax.checks import FAIL, PASS, SKIP, Check, Verdict, table_text
from replicax.cluster import verdict as cluster_verdict
from replicax.cluster.failure import before_stopping, fail, has_joined, is_collateral
from replicax.cluster.place import Place
from replicax.core.job import Alone, Job
from replicax.doctor import device_checks, joined
from replicax.doctor.between import CLOCKS, DIFFERENCES, check_clocks, check_surroundings
from replicax.doctor.combined import STYLE, combined, failed, guarded, summary, worst
from replicax.doctor.device_checks import DEVICES, MESH, REDUCTION
from replicax.doctor.installation import LIMITS, VERSIONS, check_limits, check_versions
from replicax.doctor.joined import COORDINATOR, JOINED, PLACE
from replicax.doctor.shared_folders import FOLDER, check_folders

PART_SECONDS = 0.5
"""For the others to read why from process 0; once it is gone, JAX's runtime aborts them."""
_TOGETHER = (DIFFERENCES, CLOCKS, FOLDER, DEVICES, MESH, REDUCTION)
_ITS_OUTPUT = "see the output of that process"


@dataclasses.dataclass(kw_only=True, eq=False)
class Examination:
    """Runs the checks of this process; process 0 has the rows of all.

    First comes what a process finds out by itself, then what goes over the processes' own link,
    and last the devices: a check that hangs or fails there hides none of the others.
    """

    named_folders: Sequence[str]
    """Folders to look at beside the usual ones."""
    largest_bytes: int
    """Size of the largest all-reduce."""
    timeout_seconds: float
    """Time until all processes must have come."""
    show: Callable[[str], None]
    """Called with the name of the check that is next."""
    say: Callable[[str], None]
    """Called with a line while something is waited for."""
    finish: Callable[["Examination"], None]
    """Called once: at the end, or just before the others end this process."""
    rows: list[Check] = dataclasses.field(default_factory=list)
    place: Place | None = None
    job: Job | None = None
    verdict: Verdict = FAIL
    """Verdict of the whole job, the same in all processes; a problem until it is known."""
    running: str = VERSIONS
    """The check that runs, or the last one that did."""
    parted: bool = False
    """Whether a check failed that the others wait in: then no exit may wait for them."""
    _finishing: threading.Lock = dataclasses.field(default_factory=threading.Lock)

    def __str__(self) -> str:
        return table_text(self.rows, summary(self.rows), style=STYLE)

    def run(self) -> None:
        """Fill `rows`, and finish."""
        self._by_itself()
        self._join()
        if self.job is not None:
            self._in_company(self.job)
        elif not self.parted:
            self._unjoined()
        self._finishing.acquire()  # and keep it: whoever has it finishes
        self.finish(self)

    @property
    def is_finishing(self) -> bool:
        """Whether all there is to find has been found."""
        return self._finishing.locked()

    def terminate(self) -> None:
        """Finish at once, since who started this process ends it, and tell the others."""
        why = "ended by SIGTERM, as launchers do once a process has failed"
        self._cut_short(why, "see what started it")
        self._part(self.rows)

    def _cut_short(self, why: str, fix: str) -> None:
        """Finish with `why` as what the running check has found."""
        if not self._finishing.acquire(blocking=False):
            return
        self.rows.append(Check(self.running, "", FAIL, why, fix))
        self._skip_the_rest("not done: the processes had stopped")
        self.finish(self)

    def _by_itself(self) -> None:
        env = os.environ
        self._check(VERSIONS, check_versions)
        self._check(LIMITS, lambda: check_limits(env))
        self._check(PLACE, self._placed)
        self._check(
            COORDINATOR,
            lambda: joined.check_coordinator(self.place, env, self.timeout_seconds, self.say),
        )

    def _placed(self) -> list[Check]:
        rows, self.place = joined.check_place(os.environ)
        return rows

    def _join(self) -> None:
        self._begin(JOINED)
        if self.place is not None and self.place.processes > 1:
            before_stopping(self._stopped)
        before = [row for row in self.rows if row.subject == COORDINATOR]
        rows, self.job = joined.check_joining(self.place, before, self.timeout_seconds)
        self.rows += rows
        if self.job is None:
            self._part(rows)
            if self.parted:
                self._skip_the_rest("not done: the processes have not joined")

    def _in_company(self, job: Job) -> None:
        """Run the checks that need all processes; each runs all of it, in this order."""
        env = os.environ
        checks: dict[str, Callable[[], Sequence[Check]]] = {
            DIFFERENCES: lambda: check_surroundings(job, env),
            CLOCKS: lambda: check_clocks(job),
            FOLDER: lambda: check_folders(job, self.named_folders),
            DEVICES: lambda: self._shared(job, device_checks.check_devices(env)),
            MESH: device_checks.check_mesh,
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
                elif check in (MESH, REDUCTION) and PASS not in devices:
                    self.rows.append(Check(check, "", SKIP, "not done: there are no devices"))
                else:
                    self.rows += guarded(check, function)
            self.verdict = job.gather("the doctor's verdict", worst(self.rows))[0]
        except Exception as error:  # the others wait in this check, and need to be told
            self.rows.append(failed(self.running, error))
            self._part(self.rows[-1:], collateral=is_collateral(error))
            self._skip_the_rest("not done: a check before it failed, and the processes parted")

    def _unjoined(self) -> None:
        """Run the checks that are left to a process that could not join."""
        why = "not done: the processes have not joined"
        self.rows += [Check(check, "", SKIP, why) for check in (DIFFERENCES, CLOCKS)]
        self._check(FOLDER, lambda: check_folders(Alone(), self.named_folders))
        self._check(DEVICES, lambda: device_checks.check_devices(os.environ))
        self._skip_the_rest(why)

    def _check(self, check: str, function: Callable[[], Sequence[Check]]) -> None:
        self._begin(check)
        self.rows += guarded(check, function)

    def _begin(self, check: str) -> None:
        self.running = check
        if self.job is not None:
            self.job.move()
        self.show(check)

    def _shared(self, job: Job, rows: Sequence[Check]) -> list[Check]:
        """The rows of all processes as one list."""
        own = [vars(row) for row in rows]
        values: list[list[dict[str, Any]]] = job.gather("the doctor's rows", own)
        return combined([[Check(**value) for value in values_of] for values_of in values])

    def _part(self, rows: Sequence[Check], *, collateral: bool = False) -> None:
        """Tell the others, if there are any, that this process fails."""
        self.parted = has_joined()
        if not self.parted:
            return
        problem = next((row for row in rows if row.verdict == FAIL), None)
        text = f"{problem.subject}: {problem.found}" if problem else "the doctor failed"
        verdict = fail(text, collateral=collateral)
        if verdict is not None:
            # What failed here only followed from that.
            if collateral:
                self.rows.pop()
            self.rows.append(Check(self.running, "", FAIL, verdict.reason, _ITS_OUTPUT))

    def _skip_the_rest(self, why: str) -> None:
        done = {row.subject for row in self.rows}
        self.rows += [Check(check, "", SKIP, why) for check in _TOGETHER if check not in done]

    def _stopped(self, verdict: cluster_verdict.Verdict) -> None:
        with contextlib.suppress(Exception):
            self._cut_short(verdict.reason, _ITS_OUTPUT)
        if self.place is not None and self.place.process == 0:
            time.sleep(PART_SECONDS)
