"""Ray on this host: a new head in a new folder."""

import contextlib
import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

START_SECONDS = 240
STOP_SECONDS = 15


def missing_ray() -> str | None:
    """Return why Ray cannot run here."""
    if importlib.util.find_spec("ray") is None:
        return "ray not installed (pip install 'replicax[ray]')"
    return None


@contextlib.contextmanager
def ray_cluster(cpus: int) -> Iterator[tuple[str, Path]]:
    """Start a cluster of one node with `cpus`; yields its address and its folder."""
    # In the temporary folder: paths of Ray's sockets have at most 107 characters.
    folder = Path(tempfile.mkdtemp(prefix="ray-"))
    port = _free_port()
    command = [
        str(Path(sys.executable).with_name("ray")),
        "start",
        "--head",
        "--block",
        f"--port={port}",
        "--node-ip-address=127.0.0.1",
        f"--num-cpus={cpus}",
        "--num-gpus=0",
        "--object-store-memory=80000000",
        f"--temp-dir={folder}",
        "--include-dashboard=false",
        "--disable-usage-stats",
    ]
    env = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    env["RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"] = "0"  # there is nothing left to wait for
    output = folder / "head.out"
    with output.open("wb") as out:
        head = subprocess.Popen(
            command,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
    try:
        deadline = time.monotonic() + START_SECONDS
        while "Ray runtime started" not in output.read_text():
            if head.poll() is not None or time.monotonic() > deadline:
                raise TimeoutError(f"Ray did not start:\n{output.read_text()}")
            time.sleep(0.05)
        yield f"127.0.0.1:{port}", folder
    finally:
        head.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            head.wait(STOP_SECONDS)
        with contextlib.suppress(ProcessLookupError):  # the head's own, all in its group
            os.killpg(head.pid, signal.SIGKILL)
        head.wait()
        shutil.rmtree(folder, ignore_errors=True)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port
