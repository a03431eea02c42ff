"""Join the processes of a job, and start JAX's distributed runtime."""

import atexit
import contextlib
import os
import socket
from collections.abc import Sequence
from functools import partial

import jax

from replicax.cluster.accelerators import deal, visible_gpus
from replicax.cluster.alike import beyond_common, compared_environment, processor
from replicax.cluster.cluster_job import ClusterJob, Linked, Lone, current_job, set_job
from replicax.cluster.differences import field_differences, first_of
from replicax.cluster.failure import leave_at_once, say, stop_now, watch_exceptions
from replicax.cluster.hub import Hub
from replicax.cluster.link import Link
from replicax.cluster.place import Place, find_place
from replicax.cluster.rendezvous import meet
from replicax.cluster.watchdog import LoopProgress, Timeouts, read_timeouts
from replicax.cluster.wire import Go, Hello
from replicax.core.ground.in_flight import InFlight
from replicax.core.ground.jax_internals import cache_own_programs
from replicax.errors import ClusterError
from replicax.net.address import join_address, split_address
from replicax.net.sockets import bind_port, is_loopback

_DAY_SECONDS = 86_400
_PROXIES = ("grpc_proxy", "https_proxy", "http_proxy")
"""Variables with the proxy that gRPC uses, even for this host."""
_EXEMPT = ("no_grpc_proxy", "no_proxy")
"""Variables with the hosts that gRPC reaches without a proxy; it reads the first that is set."""


def join_job(
    *,
    coordinator: str | None = None,
    processes: int | None = None,
    process: int | None = None,
    job: str | None = None,
    local_devices: Sequence[int] | None = None,
    timeout_seconds: float = 300.0,
    patience: Timeouts | None = None,
    verbose: bool = True,
) -> ClusterJob:
    """Join the other processes of this job, if the environment describes any.

    Call it first in the program: every `rx.DataParallel` made later trains in this job. It detects
    Slurm, Open MPI, Kubernetes (indexed jobs), TPU pods, `RANK`/`WORLD_SIZE`/`MASTER_ADDR`,
    `REPLICAX_*`, and other engines that JAX detects. A single process is a job of one; a second
    call returns the first call's job.
    Afterwards `jax.devices()` lists the devices of all processes. From then on, a process that is
    lost, stuck, or different from the others ends all of them, and each prints the cause to stderr.

    Examples:
        >>> job = rx.initialize()  # alone, or one of many
        >>> dp = rx.DataParallel(loss, optimizer)

    Args:
        coordinator: `host:port` where process 0 listens.
        processes: the number of processes.
        process: the rank of this process, from 0.
        job: a job ID, any text; a process with a different ID is rejected.
        local_devices: indices of the visible accelerators that this process uses. By default all,
            or an even share if several processes on a host see the same ones.
        timeout_seconds: time within which all processes must join.
        patience: timeouts for a process that makes no progress.
        verbose: whether process 0 prints the detected job, and its sources, to stderr.

    Returns:
        The job: `process`, `processes`, the methods that `DataParallel` needs, and `place`, the
        detected values and their sources.

    Raises:
        ConfigError: a variable or an argument is missing, invalid, or contradicts another.
        ClusterError: another process cannot be reached, never joined, or rejects this one.
        AgreementError: the processes have different versions, XLA flags or settings of JAX.
    """
    earlier = current_job()
    if earlier is not None and (earlier.processes == 1 or jax.distributed.is_initialized()):
        return earlier
    timeouts = read_timeouts(os.environ) if patience is None else patience
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
        return _join(place, timeouts, timeout_seconds)
    lone = Lone(place)
    set_job(lone)
    return lone


def _join(place: Place, timeouts: Timeouts, timeout_seconds: float) -> Linked:
    if jax.distributed.is_initialized():
        raise ClusterError(
            "jax.distributed.initialize() was called before rx.initialize(), which calls it "
            "itself: remove the former call"
        )
    coordinator = str(place.coordinator)
    gpus = visible_gpus(os.environ, platforms=jax.config.jax_platforms)
    if not gpus:
        _check_own_name()
    with contextlib.ExitStack() as held:
        if place.process == 0:
            # Reserved until JAX's service, which shares ports, listens on it.
            holder = bind_port(split_address(coordinator)[0], 0, socket.SO_REUSEPORT)
            port = held.enter_context(holder).getsockname()[1]
            Hub(place, timeouts, timeout_seconds, partial(_prepare, port))
        hello = Hello(
            place.job,
            place.process,
            place.processes,
            socket.gethostname(),
            os.getpid(),
            compared_environment(os.environ),
            {} if gpus else processor(),
            gpus,
            place.local_devices,
        )
        wire, go = meet(coordinator, hello, place.secret, timeout_seconds, say)
        progress = LoopProgress(InFlight())
        stop = partial(stop_now, place.process, progress)
        # Before JAX starts, which may hang: the link's heartbeats go on meanwhile.
        job = Linked(place, Link(wire, place.process, go.names, timeouts, progress, stop))
        set_job(job)
        if not gpus:
            do_not_preempt()  # before JAX starts the threads that it is for
        _start_jax(place, go, timeout_seconds)
    atexit.register(_leave, job.link)  # registered after JAX's handler, so it runs before it
    return job


def _start_jax(place: Place, go: Go, timeout_seconds: float) -> None:
    host = split_address(str(place.coordinator))[0]
    _exempt_from_proxies(host)
    # SIGTERM must end the process; JAX's handler would swallow it.
    jax.config.update("jax_enable_preemption_service", False)
    try:
        jax.distributed.initialize(
            join_address(host, go.port),
            place.processes,
            place.process,
            local_device_ids=go.local_devices[place.process],
            cluster_detection_method="deactivate",
            initialization_timeout=int(timeout_seconds),
            shutdown_timeout_seconds=_DAY_SECONDS,  # the link detects lost and stuck processes
            coordinator_bind_address=join_address(host if is_loopback(host) else "::", go.port),
        )
    except RuntimeError as error:
        raise ClusterError(f"jax.distributed did not start: {error}") from error
    if place.process > 0:  # JAX lets process 0 alone write to its cache
        cache_own_programs()


def _exempt_from_proxies(host: str) -> None:
    """Have gRPC connect to `host` directly, whatever proxy the environment names."""
    if not any(map(os.environ.get, _PROXIES)):
        return
    exempt = next(filter(None, map(os.environ.get, _EXEMPT)), None)
    os.environ[_EXEMPT[0]] = ",".join(filter(None, [exempt, host]))


def _check_own_name() -> None:
    """Raise `ClusterError` if Gloo, the network of CPU devices, cannot find this host's address."""
    name = socket.gethostname()
    try:
        socket.getaddrinfo(name, None)
    except OSError as error:
        raise ClusterError(
            f"this host's own name {name!r} cannot be resolved ({error.strerror}), and JAX's CPU "
            f"devices find each other by it; add the line `127.0.0.1 {name}`, or this host's "
            "address in place of 127.0.0.1, to /etc/hosts"
        ) from None


def do_not_preempt() -> None:
    """Schedule this thread, and the threads it starts later, as batch work if supported.

    Batch threads do not preempt others. Gloo's receiving thread, woken while the sending thread
    holds their lock, would spin until its time slice ends: on one core, 4 ms per array of a
    reduction. And mode `exact` has more of XLA's threads than cores: a step takes 14% less time.
    """
    if hasattr(os, "SCHED_BATCH") and os.sched_getscheduler(0) == os.SCHED_OTHER:
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def _prepare(port: int, hellos: Sequence[Hello]) -> tuple[int, Sequence[Sequence[int] | None]]:
    """Return the reply to all processes: process 0's port for JAX, and each process's devices.

    Print it if processors differ: all compute, but sums may differ in their last bits.
    """
    if found := field_differences(beyond_common([hello.processor for hello in hellos])):
        say(
            f"the processors differ: {first_of(found)}: results may differ between processes in "
            "their last bits, use hosts of one kind to avoid that"
        )
    asked = [hello.local_devices for hello in hellos]
    return port, asked if any(asked) else deal([(hello.host, hello.gpus) for hello in hellos])


def _leave(link: Link) -> None:
    if link.verdict is not None:
        leave_at_once(link.verdict.code)
    link.leave()
