"""`replicax doctor`: check this machine, this installation, and this job."""

import contextlib
import dataclasses
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from types import FrameType

from replicax.cli.flags import parse
from replicax.cli.output import JsonOptions, standard_error
from replicax.cluster.failure import leave_at_once, write_failure
from replicax.cluster.variables import PROCESS_ID
from replicax.doctor.combined import NOT_WELL, STYLE, doctor_json, doctor_summary
from replicax.doctor.examination import PART_SECONDS, Examination
from replicax.errors import ConfigError, require
from replicax.text.arguments import Positive
from replicax.text.checks import FAIL, print_table
from replicax.text.table import for_stream

SPEAK_SECONDS = 2.0
"""Time for process 0 to report: launchers often kill all processes after the first exit."""


@dataclasses.dataclass(frozen=True)
class DoctorOptions(JsonOptions):
    """Checks the installation, the devices, and the processes of a job and what connects them.

    Run it alone, or started like the job that has trouble: under replicax launch, srun, mpirun, or
    in the pods. Process 0 then shows the results of all processes, and each island its way to the
    others (replicax launch --islands 3 --restarts 0). The exit code is 1 if there is a problem.
    """

    largest_mb: Positive = 64.0
    """The largest all-reduce to measure, in MB (of 2^20 bytes) per device."""
    folders: tuple[str, ...] = ()
    """Folders that all processes must share, such as those of checkpoints and data."""
    timeout: Positive = 60.0
    """Seconds to wait for all processes to join."""


class _Terminated(BaseException):
    """SIGTERM: the launcher ends this process, usually because another one failed."""


def doctor(arguments: list[str]) -> int:
    """Run the command; return its exit code."""
    options = parse("doctor", DoctorOptions, arguments)
    if not options.largest_mb * 2**20 >= 4:
        raise ConfigError(
            f"--largest-mb {options.largest_mb:g}; each device contributes at least one number of "
            "4 bytes: raise it"
        )
    require("rich", "cli")
    with contextlib.ExitStack() as terminal:
        show = terminal.enter_context(options.working())
        terminal.enter_context(standard_error())  # JAX's C++ code prints to stdout

        def finish(done: Examination) -> None:
            terminal.close()
            _report(done, options)

        examination = Examination(
            named_folders=options.folders,
            largest_bytes=int(options.largest_mb * 2**20),
            timeout_seconds=options.timeout,
            show=lambda check: show(f"checking {check}"),
            say=_say,
            finish=finish,
        )
        try:
            with _terminable(unless=lambda: examination.is_finishing):
                examination.run()
        except _Terminated:
            examination.terminate()
    code = int(examination.verdict == FAIL)
    if code:
        _leave_word(examination)
    if examination.parted:
        if examination.job is None or examination.job.process == 0:
            time.sleep(PART_SECONDS)
        leave_at_once(code)  # an exit would wait for processes that have given up
    return code


def _report(done: Examination, options: DoctorOptions) -> None:
    place = done.place
    if place is not None and place.process > 0:
        # Process 0 reports for all, as far as it received their results.
        for row in done.rows:
            untold = done.job is None or (done.parted and row.subject == done.running)
            if untold and row.verdict in NOT_WELL:
                fix = f": {row.cause}" if row.cause else ""
                _say(f"process {place.process}, {row.subject}: {row.found}{fix}")
        return
    about = {
        "replicax_doctor": 1,
        "host": socket.gethostname(),
        "time": time.time(),
        "process": place and place.process,
        "processes": place and place.processes,
    }
    options.write_json(doctor_json(done.rows, done.verdict, about))
    if not options.json:
        print_table(done.rows, doctor_summary(done.rows), style=STYLE)


def _leave_word(done: Examination) -> None:
    """Write a failure report for the launcher, which reports the first failure."""
    variable = os.environ.get(PROCESS_ID, "0").strip()  # if the place was not detected
    rank = int(variable) if variable.isdecimal() else 0
    number = done.place.process if done.place else rank
    if number > 0 and not done.parted:
        if done.job is not None:
            write_failure(number, "process 0 reports for all", blames=[0])
            return
        time.sleep(SPEAK_SECONDS)
    write_failure(number, f"the doctor found {doctor_summary(done.rows)}", blames=None)


@contextlib.contextmanager
def _terminable(unless: Callable[[], bool]) -> Iterator[None]:
    """Raise `_Terminated` on SIGTERM, so that the results so far are still reported."""

    def stop(number: int, frame: FrameType | None) -> None:
        if not unless():
            raise _Terminated

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _say(line: str) -> None:
    print(for_stream(f"replicax: {line}", sys.stderr), file=sys.stderr, flush=True)
