"""Checks of this process's rank in its job, the connection to process 0, and joining."""

import dataclasses
import errno
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence

from replicax.cluster.place import Place, find_place
from replicax.cluster.rendezvous import bound_socket, reach
from replicax.cluster.watchdog import read_timeouts
from replicax.core.ground.job import Alone, Job
from replicax.doctor.combined import checks_or_error, finding_and_fix, has_failed
from replicax.errors import AgreementError, ClusterError, ConfigError
from replicax.islands.initialize import initialize
from replicax.net.address import split_address
from replicax.net.sockets import is_loopback
from replicax.text.checks import FAIL, NOTE, PASS, SKIP, Check

PLACE = "place"
COORDINATOR_CHECK = "coordinator"
JOINED = "joined"
LEAST_PATIENCE_SECONDS = 30.0
"""Per check: some compile, and some wait for a slow host."""
_NAMED = 8


def check_place(env: Mapping[str, str]) -> tuple[list[Check], Place | None]:
    """Return the row, and the place if it could be determined."""
    try:
        place = find_place(env)
    except ConfigError as error:
        return [Check(PLACE, "", FAIL, *finding_and_fix(str(error)))], None
    by = "" if place.engine == "nothing" else f"{place.engine}: "
    named = ("engine", "process", "processes", "coordinator", "job")
    figures = {name: getattr(place, name) for name in named} | {"reasons": dict(place.reasons)}
    return [Check(PLACE, "", PASS, f"{by}{place.line()}", figures=figures)], place


def check_coordinator(
    place: Place | None, timeout_seconds: float, say: Callable[[str], None]
) -> list[Check]:
    """Check that process 0 can listen on the coordinator's port, or that others can reach it.

    The others try for `timeout_seconds`, and report progress through `say`.
    """
    if place is None:
        return [Check(COORDINATOR_CHECK, "", SKIP, "the rank of this process is unknown")]
    if place.coordinator is None:
        return [Check(COORDINATOR_CHECK, "", SKIP, "one process: no coordinator needed")]
    host, port = split_address(place.coordinator)
    if is_loopback(host) and (place.local_processes or place.processes) < place.processes:
        found = (
            f"{place.coordinator} is local to each host, but the {place.processes} processes are "
            f"not all on one host ({place.local_processes} here)"
        )
        fix = "set REPLICAX_COORDINATOR to the name of process 0's host"
        return [Check(COORDINATOR_CHECK, "", FAIL, found, fix)]
    if place.process == 0:
        return _check_port(place, host, port)
    return _check_way(place, host, port, timeout_seconds, say)


def _check_port(place: Place, host: str, port: int) -> list[Check]:
    """Check on process 0 that the port is free and the name refers to this host."""
    try:
        known = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        found = f"the name {host!r} cannot be resolved here ({error.strerror})"
        fix = "correct the name, or set REPLICAX_COORDINATOR to the address of this host"
        return [Check(COORDINATOR_CHECK, "", FAIL, found, fix)]
    try:
        bound_socket(place).close()
    except ClusterError as error:
        return [Check(COORDINATOR_CHECK, "", FAIL, *finding_and_fix(str(error)))]
    addresses = list(dict.fromkeys(str(address[4][0]) for address in known))
    shown = "" if addresses == [host] else f" ({', '.join(addresses)})"
    figures = {"host": host, "port": port, "addresses": addresses}
    if not any(map(_is_own, addresses)):
        here = socket.gethostname()
        found = f"{host}{shown} is not an address of this host, {here}, where process 0 listens"
        fix = "start process 0 there, or correct REPLICAX_COORDINATOR"
        return [Check(COORDINATOR_CHECK, "", NOTE, found, fix, figures)]
    found = f"{host}{shown}, port {port} is free for process 0"
    return [Check(COORDINATOR_CHECK, "", PASS, found, figures=figures)]


def _check_way(
    place: Place, host: str, port: int, timeout_seconds: float, say: Callable[[str], None]
) -> list[Check]:
    """Check on another process that it can reach process 0."""
    started = time.monotonic()
    figures: dict[str, object] = {"host": host, "port": port}
    try:
        reach(str(place.coordinator), started + timeout_seconds, say).close()
    except ClusterError as error:
        found = str(error).replace("; ", ": ", 1)
        fix = _fix_of_way(error.__context__, host, port)
        return [Check(COORDINATOR_CHECK, "", FAIL, found, fix, figures)]
    figures["milliseconds"] = 1e3 * (time.monotonic() - started)
    found = f"process 0 is reachable at {place.coordinator}"
    return [Check(COORDINATOR_CHECK, "", PASS, found, figures=figures)]


def _fix_of_way(error: BaseException | None, host: str, port: int) -> str:
    if isinstance(error, socket.gaierror):
        return "correct REPLICAX_COORDINATOR, or use the address instead of the name"
    if isinstance(error, ConnectionRefusedError):
        return "start process 0, or see its output for why it does not listen"
    return f"let the hosts reach {host} on port {port} and above, or use another network"


def _is_own(address: str) -> bool:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as trial:
            trial.bind((address, 0))
    except OSError as error:
        return error.errno != errno.EADDRNOTAVAIL  # other errors do not tell whose it is
    return True


def check_joining(
    place: Place | None, before: Sequence[Check], timeout_seconds: float
) -> tuple[list[Check], Job | None]:
    """Join the others; return the row, and the job, or None if joining failed.

    `before` has the rows on the coordinator. All processes must join within `timeout_seconds`;
    each check also has that long, if it is more than the default.
    """
    if place is None:
        return [Check(JOINED, "", SKIP, "the rank of this process is unknown")], None
    if place.processes == 1:
        return [Check(JOINED, "", SKIP, "one process")], Alone()
    if any(row.verdict == FAIL for row in before):
        return [Check(JOINED, "", SKIP, "not run: see the coordinator")], None
    started = time.monotonic()
    try:
        start_seconds = max(timeout_seconds, LEAST_PATIENCE_SECONDS)
        timeouts = dataclasses.replace(read_timeouts(os.environ), start_seconds=start_seconds)
        job = initialize(timeout_seconds=timeout_seconds, patience=timeouts, verbose=False)
    except Exception as error:
        if isinstance(error, ClusterError) and not isinstance(error, AgreementError):
            fix = "start all with the same address, job ID, secret and count; see their output"
            return [Check(JOINED, "", FAIL, str(error), fix)], None
        return [has_failed(JOINED, error)], None
    seconds = time.monotonic() - started
    return checks_or_error(JOINED, lambda: _who(job, seconds)), job


def _who(job: Job, seconds: float) -> list[Check]:
    own = {"host": socket.gethostname(), "pid": os.getpid(), "seconds": seconds}
    them = job.gather("the doctor's processes", own)
    hosts = list(dict.fromkeys(each["host"] for each in them))
    slowest = max(each["seconds"] for each in them)
    apart = len(hosts) > 1
    where = f"on {len(hosts)} hosts" if apart else f"on {hosts[0]}"
    named = [
        f"{n} is pid {each['pid']}" + (f" on {each['host']}" if apart else "")
        for n, each in enumerate(them)
    ]
    more = f" and {len(them) - _NAMED} more" if len(them) > _NAMED else ""
    found = f"{len(them)} processes {where} in {slowest:.1f} s: {', '.join(named[:_NAMED])}{more}"
    return [Check(JOINED, "", PASS, found, figures={"processes": them, "hosts": hosts})]
