"""Run a job on this host, with restarts."""

import dataclasses
import os
import secrets
import shutil
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from replicax.cluster.watchdog import SAVED
from replicax.errors import ConfigError
from replicax.launch.attempt import STOPPED_EARLY, Attempt, Conclusion, judge
from replicax.launch.cause import Failure, Restarts, posix_signal_name
from replicax.launch.compiled_folder import compilation_cache
from replicax.launch.context import LaunchContext
from replicax.launch.echo import Echo
from replicax.launch.event_loop import EventLoop, collected_signals, signals_taken
from replicax.launch.island_supervisor import island_labels, run_islands
from replicax.launch.job_spec import JobSpec
from replicax.launch.process import core_blocks
from replicax.text.table import width
from replicax.text.wording import counted

GRACE_SECONDS = 30.0
_MOST_PROCESSES = 4096
"""Processes on one host, and devices that each may simulate: far above any use."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Outcome of a job."""

    exit_code: int
    """0 if all processes are done; 75 if they stopped early with everything saved; else the exit
    code of the first failure, 128 plus the number for a signal."""
    failure: Failure | None
    """The first failure of the last attempt, if it failed."""
    stopped_by: str | None
    """The signal that ended it, if any."""
    message: str | None
    """One line about its end, if it did not end normally."""
    seconds: float
    logs: Path
    """The folder with the output of the processes."""
    attempts: int
    """Number of attempts."""


def launch(
    job: JobSpec,
    *,
    env: Mapping[str, str] | None = None,
    logs: str | Path | None = None,
    quiet: bool = False,
    grace_seconds: float = GRACE_SECONDS,
) -> Outcome:
    """Start the processes of `job` on this host and return once all of them are gone.

    Meanwhile signals to this process are forwarded to them, SIGHUP and SIGQUIT as SIGTERM; after
    one of these or a SIGINT they have `grace_seconds` to exit. Their environment is `env`, or this
    process's; their output goes to the folder `logs`, or a new one in `logs/`. A secret in their
    environment keeps all other processes out of the job.

    Raises:
        ConfigError: an invalid job.
        ClusterError: the system cannot start that many processes.
    """
    base = dict(os.environ if env is None else env)
    _check(job, base)
    everything = job.processes * (job.islands or 1)
    cores = core_blocks(everything) if job.pin else [()] * everything
    job_id = secrets.token_hex(8)
    folder = _folder(logs, job_id)
    began = time.monotonic()
    labels = island_labels(job.islands, job.processes) if job.islands else ()
    echo = Echo(everything, quiet, labels)
    base["COLUMNS"] = str(width() - echo.prefix_width)  # so that a table fits beside the prefix
    with compilation_cache(job, base) as base, collected_signals() as signals:
        echo.say(f"launch {_size(job)} · job {job_id}\nlogs   {folder}/")
        loop = EventLoop(echo, signals, grace_seconds)
        context = LaunchContext(job, job_id, secrets.token_urlsafe(), base, folder, cores)
        run = run_islands if job.islands else _run_processes
        try:
            conclusion, attempts = run(context, loop)
        finally:
            echo.close(lambda: signal.SIGINT in signals_taken(signals))
    return Outcome(
        exit_code=conclusion.exit_code,
        failure=conclusion.failure,
        stopped_by=None if loop.stopped_by is None else posix_signal_name(loop.stopped_by),
        message=conclusion.message,
        seconds=time.monotonic() - began,
        logs=folder,
        attempts=attempts,
    )


def _run_processes(context: LaunchContext, loop: EventLoop) -> tuple[Conclusion, int]:
    names = [f"process-{number}" for number in range(context.job.processes)]

    def prepare(attempt: int) -> Attempt:
        job_id = context.job_id if attempt == 1 else secrets.token_hex(8)
        # Under its own id: a process that is left of the last attempt is a stranger to this one.
        renewed = dataclasses.replace(context, job_id=job_id)
        return Attempt(renewed.starts(names, attempt), loop)

    return run_with_restarts(prepare, Restarts(context.job.restarts), loop)


def run_with_restarts(
    prepare: Callable[[int], Attempt], restarts: Restarts, loop: EventLoop
) -> tuple[Conclusion, int]:
    """Run a job that restarts as a whole; return its last conclusion and its number of attempts.

    `prepare` returns the next attempt, given its number, from 1.
    """
    attempts = 0
    while True:
        attempts += 1
        start = time.monotonic()
        conclusion = judge(loop, prepare(attempts).run())
        if loop.told or (conclusion.failure is None and conclusion.exit_code != SAVED):
            return conclusion, attempts
        refused = restarts.refused(conclusion.failure, time.monotonic() - start)
        if refused is not None:
            message = "; ".join(filter(None, [conclusion.message, refused]))
            return dataclasses.replace(conclusion, message=message), attempts
        how = conclusion.failure or STOPPED_EARLY
        loop.echo.say(f"replicax: {how}; {restarts.progress}", error=True)


def _size(job: JobSpec) -> str:
    """Return the number of islands, processes and devices, for the first line."""
    parts = [counted(job.processes, "process")]
    if job.islands:
        parts = [counted(job.islands, "island"), *([f"{parts[0]} each"] * (job.processes > 1))]
    if job.devices_per_process is not None:
        parts.append(f"{counted(job.devices_per_process, 'device')} each")
    return " · ".join(parts + ["pinned"] * job.pin)


def _check(job: JobSpec, env: Mapping[str, str]) -> None:
    """Raise `ConfigError` if `job` cannot be started on this host."""
    check_numbers(job)
    islands = f"--islands {job.islands} of " if job.islands else ""
    if job.processes * (job.islands or 1) > _MOST_PROCESSES:
        raise ConfigError(
            f"{islands}--processes {job.processes}; on one host it must be at most "
            f"{_MOST_PROCESSES}: lower it"
        )
    program = job.command[0]
    if shutil.which(program, path=env.get("PATH", os.defpath)):
        return
    if not os.path.isfile(program):
        where = "is not a file" if os.path.dirname(program) else "is not on the PATH"
        raise ConfigError(f"command {program!r} {where}; check its name after --")
    fix = f"write -- python {program}" if program.endswith(".py") else f"chmod +x {program}"
    raise ConfigError(f"command {program!r} is not executable: {fix}")


def check_numbers(job: JobSpec) -> None:
    """Raise `ConfigError` if the numbers of `job` are invalid on any engine."""
    if not job.command:
        raise ConfigError("no command to launch; it comes last, after --: -- python train.py")
    if job.processes < 1:
        raise ConfigError(f"--processes {job.processes}; a job needs at least 1: raise it")
    if job.islands is not None and job.islands < 1:
        raise ConfigError(f"--islands {job.islands}; a job needs at least 1: raise it")
    if job.devices_per_process is not None and job.devices_per_process < 1:
        raise ConfigError(
            f"--devices-per-process {job.devices_per_process}; each process needs at least 1: "
            "raise it, or leave it out"
        )
    if job.restarts < 0:
        raise ConfigError(f"--restarts {job.restarts}; it must be at least 0: raise it")


def _folder(logs: str | Path | None, job_id: str) -> Path:
    """Return a folder that exists, is writable, and has no logs of another job."""
    default = Path("logs") / f"launch-{time.strftime('%Y%m%d-%H%M%S')}-{job_id[:4]}"
    folder = default if logs is None else Path(logs)
    fix = "choose another folder with --logs"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"logs cannot go to {folder}: {error.strerror}; {fix}") from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(f"logs cannot go to {folder}: it is not writable; {fix}")
    others = (path for kind in ("process", "island") for path in folder.glob(f"{kind}-*.*"))
    if other := next(others, None):
        raise ConfigError(f"{folder} has the logs of another job ({other.name}); {fix}")
    return folder
