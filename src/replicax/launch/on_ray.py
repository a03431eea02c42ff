"""Run a job on a Ray cluster, by an actor for each process."""

import dataclasses
import os
import signal
import socket
import time
from collections.abc import Mapping
from types import ModuleType

from replicax.errors import ClusterError, ConfigError, require
from replicax.launch.attempt import stop_text
from replicax.launch.echo import Echo
from replicax.launch.event_loop import EventLoop, collected_signals, signals_taken
from replicax.launch.job_spec import JobSpec
from replicax.launch.ray_actors import ray_reason
from replicax.launch.ray_placed import PlacedIslands, PlacedProcesses
from replicax.launch.supervisor import GRACE_SECONDS, check_numbers
from replicax.net.address import split_address
from replicax.text.wording import counted

REACH_SECONDS = 5.0
_LAST_LINES_SECONDS = 0.5
"""How long Ray, too, waits for the last output of its workers before it leaves."""

# Read by Ray at import, or by its processes; values set by the user take precedence.
_SETTINGS = {
    "RAY_DEDUP_LOGS": "0",  # show equal lines of two processes
    "RAY_COLOR_PREFIX": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # the future default, without its warning
}


@dataclasses.dataclass(frozen=True)
class RayOptions:
    """The Ray cluster, and the resources to request."""

    address: str | None = None
    """Address of the cluster, host:port; by default RAY_ADDRESS, or the one on this host."""
    gpus_per_process: int | None = None
    """GPUs per process; by default none, which a line says."""
    cpus_per_process: int = 1
    """CPU cores per process, as counted by Ray."""


def launch_on_ray(job: JobSpec, options: RayOptions) -> tuple[int, str | None]:
    """Run `job` on a running Ray cluster; return the exit code and a final message or None.

    Ray places the processes, and restarts all of them after a failure, up to `job.restarts` times;
    of islands, only the one that failed. Their output is shown here, each line prefixed with Ray's
    name for the process and its rank, or its island. The command runs in this process's working
    directory if the node has it, with the node's environment, plus this process's variables that
    start with one of `ray_actors.FORWARDED`.

    Raises:
        ConfigError: an invalid number, or an option that Ray does not support.
        ClusterError: no cluster can be reached.
        MissingDependencyError: Ray is not installed.
    """
    check_numbers(job)
    if job.pin:
        raise ConfigError(
            "--pin with --on ray; Ray places the processes: leave out --pin, and set the number of "
            "cores with --cpus-per-process"
        )
    if job.islands is not None and job.processes > 1:
        raise ConfigError(
            f"--processes {job.processes} with --islands {job.islands} and --on ray; an island has "
            "one process there, with all devices of its bundle: start more islands"
        )
    takes: dict[str, int] = {}
    for kind, count, least in (
        ("CPU", options.cpus_per_process, 1),
        ("GPU", options.gpus_per_process or 0, 0),
    ):
        if count < least:
            flag = f"--{kind.lower()}s-per-process"
            raise ConfigError(f"{flag} {count}; it must be at least {least}: raise it")
        takes |= {kind: count} if count else {}
    for name, value in _SETTINGS.items():  # before Ray is imported
        os.environ.setdefault(name, value)
    ray = require("ray", "ray")
    address = _connect(ray, options)
    try:
        each = " and ".join(f"{count} {kind}" for kind, count in takes.items())
        parts = job.islands or job.processes
        of_job = counted(parts, "island" if job.islands else "process")
        print(f"launch {of_job} of {each} · Ray at {address}", flush=True)
        have = ray.cluster_resources()
        for kind, count in takes.items():
            if parts * count > (there := int(have.get(kind, 0))):
                print(
                    f"waits  {parts} × {count} {kind} needed and the cluster has {there}: "
                    "waiting for it to scale up",
                    flush=True,
                )
        return run_on_ray(ray, job, takes)
    finally:
        ray.shutdown()


def _connect(ray: ModuleType, options: RayOptions) -> str:
    """Join the cluster; return its address."""
    address = options.address or os.environ.get("RAY_ADDRESS") or "auto"
    named = "--address" if options.address else "RAY_ADDRESS"
    if "://" in address:
        raise ConfigError(
            f"{named} {address}; the launcher must run on a node of the cluster: give host:port "
            "there, or submit the command with `ray job submit`"
        )
    if address != "auto":
        _reach(address, named)
    try:
        context = ray.init(address=address, logging_level="WARNING", log_to_driver=True)
    except (ConnectionError, RuntimeError, ValueError) as error:
        if address == "auto":
            raise ClusterError(
                "no Ray cluster runs on this host and no address is set; start one with `ray start "
                "--head`, or give --address host:port"
            ) from error
        first = str(error).strip().partition("\n")[0]
        raise ClusterError(f"{named}={address}: Ray cannot join that cluster: {first}") from error
    return str(context.address_info["address"])


def _reach(address: str, named: str) -> None:
    """Raise if the connection is refused; Ray would retry for a minute."""
    try:
        place = split_address(address)
    except ValueError as error:
        raise ConfigError(f"{named}={address}; the address must be host:port") from error
    try:
        socket.create_connection(place, timeout=REACH_SECONDS).close()
    except OSError as error:
        why = error.strerror or str(error)
        raise ClusterError(
            f"{named}={address} cannot be reached ({why}); is the cluster running? start one with "
            f"`ray start --head --port={place[1]}`"
        ) from error


def run_on_ray(ray: ModuleType, job: JobSpec, takes: Mapping[str, int]) -> tuple[int, str | None]:
    """Run a job of which each part takes `takes`; return the exit code and a message."""
    place = PlacedIslands if job.islands else PlacedProcesses
    try:
        placed = place(ray, job, takes)
    except ray.exceptions.RayError as error:
        return 1, f"Ray cannot place the job: {ray_reason(error)}"
    except KeyboardInterrupt:
        return 128 + signal.SIGINT, stop_text(signal.SIGINT)
    except SystemExit:  # Ray's own answer to SIGTERM
        return 128 + signal.SIGTERM, stop_text(signal.SIGTERM)
    echo = Echo(job.islands or job.processes, quiet=False)
    with collected_signals() as signals:
        try:
            conclusion = placed.supervise(EventLoop(echo, signals, GRACE_SECONDS))
            time.sleep(_LAST_LINES_SECONDS)
        finally:
            echo.close(lambda: signal.SIGINT in signals_taken(signals))
    return conclusion.exit_code, conclusion.message
