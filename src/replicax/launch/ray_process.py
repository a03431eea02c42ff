"""Inside a worker of Ray Train: one process of the job, from its start to its end."""

import os
import secrets
import selectors
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

from replicax.cluster import variables
from replicax.cluster.address import join_address
from replicax.errors import require
from replicax.launch.cause import Ended, read_report
from replicax.launch.job import Job
from replicax.launch.output import Echo, Log, Output
from replicax.launch.port import free_port
from replicax.launch.process import Process

READ_BYTES = 1 << 16


class ProcessError(RuntimeError):
    """A process of the job that failed; Ray's failure policy acts on it.

    Args:
        message: which process, and how it ended.
        ended: what is known of that.
    """

    def __init__(self, message: str, ended: Ended) -> None:
        super().__init__(message, ended)  # both, so that it survives the way to the launcher
        self.ended = ended

    def __str__(self) -> str:
        return str(self.args[0])


def run_process(config: dict[str, Any]) -> int:
    """Run the command as the process that Ray Train numbers this worker; its exit code.

    Args:
        config: `job`, the `env` to add to the node's, and the `folder` to run it in.

    Raises:
        ProcessError: the process failed.
    """
    job: Job = config["job"]
    number = require("ray.train", "ray").get_context().get_world_rank()
    with tempfile.TemporaryDirectory(prefix="replicax-") as temporary:
        failure = Path(temporary) / "failure.json"
        env = {
            **os.environ,
            **config["env"],
            **_place(number, job.processes),
            variables.FAILURE_FILE: str(failure),
            "PATH": _with_this_python(os.environ.get("PATH", os.defpath)),
            "PYTHONUNBUFFERED": "1",
        }
        echo = Echo(job.processes, quiet=False, on_change=lambda: None)
        try:
            _enter(config["folder"], number, echo)
            ended = _run(job, number, env, echo, failure)
        finally:
            echo.close()
    if not ended.end.well:
        raise ProcessError(f"process {number} ended with {ended.end.exit_code}", ended)
    return ended.end.status


def _place(number: int, processes: int) -> dict[str, str]:
    """The process's place in the job; process 0 says where it listens."""
    meeting = None
    if number == 0:
        host = require("ray.util", "ray").get_node_ip_address()
        meeting = (join_address(host, free_port()), secrets.token_hex(8))
    collective = require("ray.train.collective", "ray")
    coordinator, job_id = collective.broadcast_from_rank_zero(meeting)
    return {
        variables.PROCESS_ID: str(number),
        variables.PROCESSES: str(processes),
        variables.COORDINATOR: coordinator,
        variables.JOB_ID: job_id,
    }


def _with_this_python(path: str) -> str:
    """The programs beside the Python that runs Ray come first: `python`, `replicax`."""
    return os.pathsep.join([os.path.dirname(sys.executable), path])


def _enter(folder: str, number: int, echo: Echo) -> None:
    """Go where the job was launched, if this node has that folder."""
    try:
        os.chdir(folder)
    except OSError as error:
        line = f"replicax: {folder}: {error.strerror} on this node; running in {os.getcwd()}"
        echo.lines(number, [line.encode()], error=False)


def _run(job: Job, number: int, env: dict[str, str], echo: Echo, failure: Path) -> Ended:
    """Return once the process and all that it started are gone."""
    log = Log(Path(os.devnull), lambda line: None)  # Ray keeps the output in files of its own
    process = Process(number, job.command, env, ())
    errors = Output(number, echo, log, error=True)
    outputs = {process.stdout: Output(number, echo, log, error=False), process.stderr: errors}
    try:
        with selectors.DefaultSelector() as selector:
            selector.register(process.channel, selectors.EVENT_READ)
            for stream in outputs:
                selector.register(stream, selectors.EVENT_READ)
            while selector.get_map():
                for key, _ in selector.select():
                    if key.fd == process.channel:
                        more = process.listen()
                    else:
                        data = os.read(key.fd, READ_BYTES)
                        outputs[key.fd].feed(data)
                        more = bool(data)
                    if not more:
                        selector.unregister(key.fd)
    finally:
        for output in outputs.values():
            output.end()
        process.stop(signal.SIGKILL)
        process.close()
        log.close()
    assert process.end is not None
    return Ended(process.end, read_report(failure, number), tuple(errors.tail), log.path)
