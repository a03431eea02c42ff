"""Run a job on a Ray cluster: Ray Train places the processes and restarts them after a failure.

Islands are placed by `islands_on_ray.py`.
"""

import dataclasses
import os
import secrets
import signal
import socket
import tempfile
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from replicax.cluster.address import join_address, split_address
from replicax.cluster.watchdog import SAVED
from replicax.errors import ClusterError, ConfigError, require
from replicax.launch.attempt import STOPPED_EARLY
from replicax.launch.cause import Ended, first_failure
from replicax.launch.echo import Echo
from replicax.launch.event_loop import EventLoop, collected_signals
from replicax.launch.islands_on_ray import run_islands_on_ray
from replicax.launch.job_spec import JobSpec
from replicax.launch.process import ProcessStart, free_port
from replicax.launch.ray_worker import WORKER_ENV, forwarded, run_on_node
from replicax.launch.supervisor import GRACE_SECONDS, check_numbers
from replicax.text.wording import counted

REACH_SECONDS = 5.0

# Read by Ray at import, or by its processes; values set by the user take precedence.
_SETTINGS = {
    "RAY_TRAIN_V2_ENABLED": "1",
    "RAY_DEDUP_LOGS": "0",  # show equal lines of two processes
    "RAY_COLOR_PREFIX": "0",
    "RAY_CHDIR_TO_TRIAL_DIR": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # the future default, without its warning
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5",
}


@dataclasses.dataclass(frozen=True)
class RayOptions:
    """The Ray cluster, and the resources to request."""

    address: str | None = None
    """Address of the cluster, host:port; by default RAY_ADDRESS, or the one on this host."""
    gpus_per_process: int = 0
    """GPUs per process."""
    cpus_per_process: int = 1
    """CPU cores per process, as counted by Ray."""


class ProcessError(RuntimeError):
    """A process of the job failed; Ray's failure policy handles it."""

    def __init__(self, message: str, ended: Ended) -> None:
        super().__init__(message, ended)  # both, so that it can be pickled
        self.ended = ended

    def __str__(self) -> str:
        return str(self.args[0])


def launch_on_ray(job: JobSpec, options: RayOptions) -> tuple[int, str | None]:
    """Run `job` on a running Ray cluster; return the exit code and a final message or None.

    Ray places the processes, and restarts all of them after a failure, up to `job.restarts` times;
    of islands, only the one that failed. Their output is shown here, each line prefixed with Ray's
    name for the process and its rank, or its island. The command runs in this process's working
    directory if the node has it, with the node's environment, plus this process's variables that
    start with one of `ray_worker.FORWARDED`.

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
        ("GPU", options.gpus_per_process, 0),
    ):
        if count < least:
            flag = f"--{kind.lower()}s-per-process"
            raise ConfigError(f"{flag} {count}; it must be at least {least}: raise it")
        takes |= {kind: count} if count else {}
    for name, value in _SETTINGS.items():
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
        if job.islands:
            return run_islands_on_ray(ray, job, takes)
        with tempfile.TemporaryDirectory(prefix="replicax-ray-") as storage:
            return _fit(require("ray.train", "ray"), job, takes, storage)
    finally:
        ray.shutdown()


def _connect(ray: ModuleType, options: RayOptions) -> str:
    """Join the cluster; return its address."""
    address = options.address or os.environ.get("RAY_ADDRESS") or "auto"
    named = "--address" if options.address else "RAY_ADDRESS"
    if "://" in address:
        raise ConfigError(
            f"{named} {address}; Ray Train must run on a node of the cluster: give host:port "
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


def _fit(
    train: ModuleType, job: JobSpec, takes: Mapping[str, int], storage: str
) -> tuple[int, str | None]:
    """Run the job with Ray Train; return the exit code and a message or None."""
    trainer_module = require("ray.train.v2.api.data_parallel_trainer", "ray")
    trainer = trainer_module.DataParallelTrainer(
        run_process,
        train_loop_config={"job": job, "env": forwarded(os.environ), "folder": os.getcwd()},
        scaling_config=train.ScalingConfig(
            num_workers=job.processes, use_gpu="GPU" in takes, resources_per_worker=dict(takes)
        ),
        run_config=train.RunConfig(
            name=job.name,
            storage_path=storage,
            failure_config=train.FailureConfig(max_failures=job.restarts),
            worker_runtime_env=WORKER_ENV,
            # Hides Ray's tracebacks of errors that the command has already printed.
            logging_config=train.LoggingConfig(log_level="CRITICAL"),
        ),
    )
    try:
        result = trainer.fit()
    except train.WorkerGroupError as error:
        return _failed(job, error.worker_failures)
    except train.TrainingFailedError as error:
        return 1, f"Ray Train failed: {_one_line(error)}"
    except SystemExit:  # Ray's own answer to Ctrl-C
        return 128 + signal.SIGINT, "stopped by SIGINT"
    if result.return_value == SAVED:
        return SAVED, f"{STOPPED_EARLY}; start it again to resume"
    return 0, None


def _failed(job: JobSpec, failures: Mapping[int, BaseException]) -> tuple[int, str]:
    """Return the exit code, and a message with the process that failed first."""
    # Ray wraps a process's error in one of its own.
    own = {rank: getattr(error, "_base_exc", error) for rank, error in failures.items()}
    told = {rank: each.ended for rank, each in own.items() if isinstance(each, ProcessError)}
    if not told:
        lost = [f"process {rank}: {_one_line(error)}" for rank, error in sorted(own.items())]
        return 1, lost[0] if lost else "Ray lost the processes; see `ray status`"
    # The others were lost with their worker, or stopped by Ray.
    silent = partial(Ended, -signal.SIGKILL, time.time(), report=None, errors=(), log=None)
    ended = [
        told[rank] if rank in told else silent(forced=rank not in own)
        for rank in range(job.processes)
    ]
    failure = first_failure(ended)
    assert failure is not None
    return failure.exit_code, f"process {failure.process} failed first: {failure.cause}"


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())


def run_process(config: dict[str, Any]) -> int:
    """Run the command inside a Ray Train worker; return the exit code.

    `config` has the `job`, the `env` to add to the node's, and the `folder` to run it in.

    Raises:
        ProcessError: the process failed.
    """
    job: JobSpec = config["job"]
    number = require("ray.train", "ray").get_context().get_world_rank()
    meeting = None
    if number == 0:  # it broadcasts its address
        host = require("ray.util", "ray").get_node_ip_address()
        meeting = join_address(host, free_port()), secrets.token_hex(8), secrets.token_urlsafe()
    collective = require("ray.train.collective", "ray")
    coordinator, job_id, secret = collective.broadcast_from_rank_zero(meeting)
    nowhere = Path(os.devnull)  # Ray writes the output to its own files
    place = number, coordinator, job_id, secret
    start = ProcessStart(job, *place, config["env"], nowhere, nowhere)
    with collected_signals() as signals:
        loop = EventLoop(Echo(job.processes, quiet=False), signals, GRACE_SECONDS)
        ended = run_on_node(start, config["folder"], loop)
    if not ended.well:
        raise ProcessError(f"process {number} ended with {ended.exit_code}", ended)
    return ended.status
