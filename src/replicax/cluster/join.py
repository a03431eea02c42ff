"""`initialize`: from a process on its own to one of a job, with JAX's runtime underneath."""

import atexit
import contextlib
import importlib.metadata
import os
import platform
import socket
import sys
from collections.abc import Sequence
from functools import partial

import jax

from replicax.cluster.accelerators import deal, visible_gpus
from replicax.cluster.address import join_address, split_address
from replicax.cluster.cluster_job import ClusterJob, Linked, Lone, current_job, set_job
from replicax.cluster.failure import leave_at_once, say, stop_now, watch_exceptions
from replicax.cluster.hub import Hub
from replicax.cluster.link import Link
from replicax.cluster.patience import Patience, find_patience
from replicax.cluster.place import Place, find_place
from replicax.cluster.pulse import Pulse
from replicax.cluster.rendezvous import is_loopback, meet
from replicax.cluster.wire import Go, Hello
from replicax.core.in_flight import InFlight
from replicax.errors import ClusterError

_PACKAGES = ("replicax", "jax", "jaxlib", "numpy", "optax", "flax")
_DAY_SECONDS = 86_400


def initialize(
    *,
    coordinator: str | None = None,
    processes: int | None = None,
    process: int | None = None,
    job: str | None = None,
    local_devices: Sequence[int] | None = None,
    timeout_seconds: float = 300.0,
    patience: Patience | None = None,
    verbose: bool = True,
) -> ClusterJob:
    """Join the other processes of this job, if the environment says that there are some.

    Call it first in the program, and hand the job that it returns to `rx.DataParallel`. It reads
    Slurm, Open MPI, Kubernetes (indexed jobs), TPU pods, `RANK`/`WORLD_SIZE`/`MASTER_ADDR` and
    `REPLICAX_*`; a lone process is a job of its own, and a second call returns the first one's.
    Afterwards `jax.devices()` are those of all processes. From then on a process that is lost,
    stuck, or different from the others ends all of them, each with the cause on stderr.

    Examples:
        >>> job = rx.initialize()  # alone, or one of many
        >>> dp = rx.DataParallel(loss, optimizer, job=job)

    Args:
        coordinator: `host:port` where process 0 listens and the others find it.
        processes: how many there are.
        process: which one this is, from 0.
        job: any text; a process with another one is refused.
        local_devices: which of the visible accelerators this process takes. By default all, or its
            share where processes on a host see the same ones.
        timeout_seconds: until all must have come.
        patience: with a process that makes no progress.
        verbose: whether process 0 says on stderr what was found, and from where.

    Returns:
        The job: `process`, `processes`, what `DataParallel` asks of it, and `place`, which tells
        what was found and what decided it.

    Raises:
        ConfigError: a variable or an argument that is missing, wrong, or contradicts another.
        ClusterError: another process cannot be reached, never came, or refuses this one.
        AgreementError: the processes have different versions of Python, JAX or Replicax.
    """
    earlier = current_job()
    if earlier is not None and (earlier.processes == 1 or jax.distributed.is_initialized()):
        return earlier
    patience = find_patience(os.environ) if patience is None else patience
    place = find_place(
        os.environ,
        coordinator=coordinator,
        processes=processes,
        process=process,
        job=job,
        local_devices=local_devices,
    )
    if verbose and place.process == 0 and place.engine != "nothing":
        say(place.line())
    if place.processes > 1:
        watch_exceptions()
        return _join(place, patience, timeout_seconds)
    lone = Lone(place)
    set_job(lone)
    return lone


def _join(place: Place, patience: Patience, timeout_seconds: float) -> Linked:
    if jax.distributed.is_initialized():
        raise ClusterError(
            "jax.distributed.initialize() was called before rx.initialize(), which calls it "
            "itself: leave out the former"
        )
    coordinator = str(place.coordinator)
    with contextlib.ExitStack() as held:
        if place.process == 0:
            port = held.enter_context(_hold_port(split_address(coordinator)[0])).getsockname()[1]
            Hub(place, patience, timeout_seconds, partial(_prepare, port))
        gpus = visible_gpus(os.environ)
        hello = Hello(
            place.job,
            place.process,
            place.processes,
            socket.gethostname(),
            os.getpid(),
            _versions(),
            gpus,
            place.local_devices,
        )
        wire, go = meet(coordinator, hello, timeout_seconds, say)
        pulse = Pulse(InFlight())
        stop = partial(stop_now, place.process, pulse)
        job = Linked(place, Link(wire, place.process, go.names, patience, pulse, stop))
        set_job(job)
        if not gpus:
            _do_not_preempt()
        _start_jax(place, go, timeout_seconds)
    atexit.register(_leave, job.link)  # after JAX's, hence before it: that waits for everybody
    return job


def _start_jax(place: Place, go: Go, timeout_seconds: float) -> None:
    host = split_address(str(place.coordinator))[0]
    # A signal to end is to end the process; JAX's own handler would swallow it.
    jax.config.update("jax_enable_preemption_service", False)
    try:
        jax.distributed.initialize(
            join_address(host, go.port),
            place.processes,
            place.process,
            local_device_ids=go.local_devices[place.process],
            cluster_detection_method="deactivate",
            initialization_timeout=int(timeout_seconds),
            shutdown_timeout_seconds=_DAY_SECONDS,  # who is lost or stuck is found out otherwise
            coordinator_bind_address=join_address(host if is_loopback(host) else "::", go.port),
        )
    except RuntimeError as error:
        raise ClusterError(f"jax.distributed did not start: {error}") from error


def _do_not_preempt() -> None:
    """Schedule this thread, and those that it makes from here on, as batch work where it can be.

    Gloo's receiving thread, woken while the sending one holds their lock, spins until its slice of
    time is over: on one core 4 ms for each array of a reduction. Batch threads wait their turn.
    """
    if hasattr(os, "SCHED_BATCH") and os.sched_getscheduler(0) == os.SCHED_OTHER:
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def _prepare(port: int, hellos: Sequence[Hello]) -> tuple[int, Sequence[Sequence[int] | None]]:
    """The answer to all who came: process 0's port for JAX, and everybody's devices."""
    told = [hello.local_devices for hello in hellos]
    return port, told if any(told) else deal([(hello.host, hello.gpus) for hello in hellos])


def _hold_port(host: str) -> socket.socket:
    """A port that nobody else is given until JAX's service, which shares ports, listens on it."""
    holder = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    holder.bind((host if is_loopback(host) else "", 0))
    return holder


def _versions() -> dict[str, str]:
    """Versions of Python and of the packages that decide on numbers, as they are loaded."""
    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        loaded = getattr(sys.modules.get(package), "__version__", None)
        try:
            versions[package] = str(loaded or importlib.metadata.version(package))
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "not installed"
    return versions


def _leave(link: Link) -> None:
    if link.verdict is not None:
        leave_at_once(link.verdict.code)
    link.leave()
