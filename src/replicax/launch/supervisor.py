"""Run a job on this host, with restarts."""

import contextlib
import dataclasses
import os
import secrets
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from replicax.cluster.watchdog import SAVED
from replicax.errors import ConfigError
from replicax.launch.attempt import Attempt, collected_signals, signals_taken
from replicax.launch.cause import Ended, Failure, Restarts, first_failure, posix_signal_name
from replicax.launch.echo import Echo
from replicax.launch.job_spec import JobSpec
from replicax.launch.process import ProcessStart, core_blocks, free_port
from replicax.wording import counted

GRACE_SECONDS = 30.0
_MOST_PROCESSES = 4096
"""Processes on one host, and devices that each may simulate: far above any use."""
CACHE = {
    "JAX_COMPILATION_CACHE_DIR": "",
    "JAX_ENABLE_COMPILATION_CACHE": "true",
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "0",
}
"""JAX's variables of its cache: all programs, as a start compiles dozens of small ones."""
STOPPED_EARLY = "stopped early with everything saved"


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
    process's; their output goes to the folder `logs`, or a new one in `runs/`. A secret in their
    environment keeps all other processes out of the job.

    Raises:
        ConfigError: an invalid job.
        ClusterError: the system cannot start that many processes.
    """
    base = dict(os.environ if env is None else env)
    _check(job, base)
    cores = core_blocks(job.processes) if job.pin else [()] * job.processes
    job_id, secret = secrets.token_hex(8), secrets.token_urlsafe()
    folder = _folder(logs, job_id)
    began = time.monotonic()
    restarts = Restarts(job.restarts)
    attempts = 0
    echo = Echo(job.processes, quiet)
    with _compilation_cache(job, base) as base, collected_signals() as signals:
        parts = [counted(job.processes, "process")]
        if job.devices_per_process is not None:
            parts.append(f"{counted(job.devices_per_process, 'device')} each")
        parts += ["pinned"] if job.pin else []
        echo.say(f"launch {' · '.join([*parts, f'job {job_id}'])}\nlogs   {folder}/")
        try:
            while True:
                attempts += 1
                again = "" if attempts == 1 else f"-attempt-{attempts}"
                coordinator = f"127.0.0.1:{free_port()}"
                starts = []
                for number in range(job.processes):
                    log = folder / f"process-{number}{again}.log"
                    report = log.with_suffix(".failure.json").absolute()
                    place = number, coordinator, job_id, secret
                    starts.append(ProcessStart(job, *place, base, log, report, cores[number]))
                attempt = Attempt(starts, echo, signals, grace_seconds)
                start = time.monotonic()
                exit_code, failure, message = _judge(attempt, attempt.run())
                if attempt.told or (failure is None and exit_code != SAVED):
                    break
                refused = restarts.refused(failure, time.monotonic() - start)
                if refused is not None:
                    message = "; ".join(filter(None, [message, refused]))
                    break
                echo.say(f"replicax: {failure or STOPPED_EARLY}; {restarts.progress}", error=True)
                job_id = secrets.token_hex(8)
        finally:
            echo.close(lambda: signal.SIGINT in signals_taken(signals))
    return Outcome(
        exit_code=exit_code,
        failure=failure,
        stopped_by=None if attempt.stopped_by is None else posix_signal_name(attempt.stopped_by),
        message=message,
        seconds=time.monotonic() - began,
        logs=folder,
        attempts=attempts,
    )


@contextlib.contextmanager
def _compilation_cache(job: JobSpec, env: dict[str, str]) -> Iterator[dict[str, str]]:
    """Yield `env`, with a folder for JAX to keep compiled programs in if the job may restart.

    It is one of this launcher's own, so that no program of another machine or job gets there; with
    any of the variables set, the user has decided otherwise.
    """
    if not job.restarts or set(CACHE) & set(env):
        yield env
        return
    with tempfile.TemporaryDirectory(prefix="replicax-compiled-", ignore_cleanup_errors=True) as at:
        yield {**env, **CACHE, "JAX_COMPILATION_CACHE_DIR": at}


def _check(job: JobSpec, env: Mapping[str, str]) -> None:
    """Raise `ConfigError` if `job` cannot be started on this host."""
    check_numbers(job)
    if job.processes > _MOST_PROCESSES:
        raise ConfigError(
            f"--processes {job.processes}; on one host it must be at most {_MOST_PROCESSES}: lower "
            "it"
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
    if job.devices_per_process is not None and job.devices_per_process < 1:
        raise ConfigError(
            f"--devices-per-process {job.devices_per_process}; each process needs at least 1: "
            "raise it, or leave it out"
        )
    if job.restarts < 0:
        raise ConfigError(f"--restarts {job.restarts}; it must be at least 0: raise it")


def _judge(attempt: Attempt, ended: Sequence[Ended]) -> tuple[int, Failure | None, str | None]:
    """Return the exit code, the first failure if one is to blame, and a message or None."""
    if all(each.status == 0 for each in ended):
        return 0, None, None
    if _stopped_early(attempt, ended):
        return SAVED, None, f"{STOPPED_EARLY}; start it again to resume"
    failure = first_failure(ended)
    stopped_by = attempt.stopped_by
    if stopped_by is None:
        return (failure.exit_code if failure else 1), failure, str(failure) if failure else None
    why = f"stopped by {posix_signal_name(stopped_by)}"
    if stopped_by == signal.SIGPIPE:
        why = "stopped: its output was closed by the reader"
    if failure is None or attempt.natural(ended[failure.process]):
        return 128 + stopped_by, None, why
    told = f"{why}; process {failure.process}: {failure.cause} (see {failure.log})"
    return failure.exit_code, failure, told


def _stopped_early(attempt: Attempt, ended: Sequence[Ended]) -> bool:
    """Return whether some processes stopped early with all saved, and none failed by itself."""
    saved = {number for number, each in enumerate(ended) if each.status == SAVED}

    def in_order(each: Ended) -> bool:
        if each.well:
            return True
        if each.report:  # it stopped because those that had saved were gone
            return bool(each.report.blames) and saved.issuperset(each.report.blames)
        if attempt.stopped_by is None:  # it continued without the others
            return each.forced
        return attempt.natural(each) and not each.forced  # too early to handle the signal

    return bool(saved) and all(map(in_order, ended))


def _folder(logs: str | Path | None, job_id: str) -> Path:
    """Return a folder that exists, is writable, and has no logs of another job."""
    default = Path("runs") / f"launch-{time.strftime('%Y%m%d-%H%M%S')}-{job_id[:4]}"
    folder = default if logs is None else Path(logs)
    fix = "choose another folder with --logs"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"logs cannot go to {folder}: {error.strerror}; {fix}") from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(f"logs cannot go to {folder}: it is not writable; {fix}")
    if other := next(folder.glob("process-*.*"), None):
        raise ConfigError(f"{folder} has the logs of another job ({other.name}); {fix}")
    return folder
