"""The processes, joined."""

import dataclasses
import os
import socket
import time
from collections.abc import Sequence

from replicax.cluster.join import initialize
from replicax.cluster.patience import find_patience
from replicax.cluster.place import Place
from replicax.core.job import Alone, Job
from replicax.doctor.row import OK, PROBLEM, SKIPPED, Row, failed, guarded
from replicax.errors import AgreementError, ClusterError

CHECK = "joined"
_NAMED = 8
LEAST_PATIENCE_SECONDS = 30.0
"""With each check: some compile, and some wait for a slow host."""


def check_joining(
    place: Place | None, before: Sequence[Row], timeout_seconds: float
) -> tuple[list[Row], Job | None]:
    """Join the others; return the row, and the job, or None where they are not joined.

    Args:
        place: of this process, where it is known.
        before: what is known of the coordinator.
        timeout_seconds: until all must have come, and then, if that is longer, for each check.
    """
    if place is None:
        return [Row(CHECK, "the place of this process is not known", SKIPPED)], None
    if place.processes == 1:
        return [Row(CHECK, "one process", SKIPPED)], Alone()
    if any(row.verdict == PROBLEM for row in before):
        return [Row(CHECK, "not tried: see the coordinator", SKIPPED)], None
    started = time.monotonic()
    try:
        start_seconds = max(timeout_seconds, LEAST_PATIENCE_SECONDS)
        patience = dataclasses.replace(find_patience(os.environ), start_seconds=start_seconds)
        job = initialize(timeout_seconds=timeout_seconds, patience=patience, verbose=False)
    except Exception as error:
        return [_not_joined(error)], None
    seconds = time.monotonic() - started
    rows = guarded(CHECK, lambda: _who(job, seconds))
    return rows, job


def _not_joined(error: Exception) -> Row:
    if isinstance(error, ClusterError) and not isinstance(error, AgreementError):
        fix = "start all with one address, job id and number of processes; see their output"
        return Row(CHECK, str(error), PROBLEM, fix)
    return failed(CHECK, error)


def _who(job: Job, seconds: float) -> list[Row]:
    own = {"host": socket.gethostname(), "pid": os.getpid(), "seconds": seconds}
    them = job.gather("the doctor's processes", own)
    hosts = list(dict.fromkeys(each["host"] for each in them))
    slowest = max(each["seconds"] for each in them)
    if len(hosts) == 1:
        named = [f"{n} is pid {each['pid']}" for n, each in enumerate(them)]
        where = f"on {hosts[0]}"
    else:
        named = [f"{n} is pid {each['pid']} on {each['host']}" for n, each in enumerate(them)]
        where = f"on {len(hosts)} hosts"
    more = f" and {len(them) - _NAMED} more" if len(them) > _NAMED else ""
    found = f"{len(them)} processes {where} in {slowest:.1f} s: {', '.join(named[:_NAMED])}{more}"
    return [Row(CHECK, found, OK, figures={"processes": them, "hosts": hosts})]
