"""Time from a killed process to the next step, under `replicax launch --restarts`.

One of two processes that train the MLP is killed with SIGKILL every so often. Each time, the
seconds until the launcher restarts the job and until the next record are taken: with JAX's cache of
compiled programs, which the launcher switches on, and without, as before it did. The share of the
clock that was productive is the run's own (`goodput.jsonl`). Writes `results/restart.json`.
"""

import argparse
import contextlib
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from timing import environment, save

from replicax.train.folder.goodput import read_goodput

PROCESSES = 2
TIMEOUT_SECONDS = 300.0
CASES = {"without_cache": {"JAX_ENABLE_COMPILATION_CACHE": "false"}, "with_cache": {}}


def children(pid: int) -> list[int]:
    """Return the children of a process."""
    with contextlib.suppress(OSError):
        return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


class Job:
    """A launched run, and the files that tell how far it is."""

    def __init__(self, folder: Path, steps: int, env: dict[str, str]) -> None:
        self.run, self._said = folder / "runs" / "killed", folder / "launcher.txt"
        train = ["-m", "replicax", "train", "mlp", "--run", "killed", "--steps", str(steps)]
        train += ["--save-every", "40", "--log-every", "10"]
        launch = ["-m", "replicax", "launch", "--processes", str(PROCESSES), "--logs", "logs"]
        launch += ["--devices-per-process", "1", "--restarts", "1000", "--"]
        with self._said.open("wb") as said:
            self.launcher = subprocess.Popen(
                [sys.executable, *launch, sys.executable, *train],
                cwd=folder,
                stdout=said,
                stderr=said,
                env={**os.environ, **env},
                start_new_session=True,
            )

    def restarts(self) -> int:
        return self._said.read_text(errors="replace").count("; restart ")

    def size(self) -> int:
        """Return the bytes of the records, which a restart cuts and the next step extends."""
        with contextlib.suppress(OSError):
            return os.path.getsize(self.run / "records.jsonl")
        return 0

    def next_step(self) -> None:
        """Return when a record is added."""
        before = self.size()
        for _ in self.waiting():
            now = self.size()
            if now > before:
                return
            before = now

    def kill_one(self) -> tuple[float, float]:
        """Kill a process; return the seconds until the restart, and until the next record."""
        restarts, began = self.restarts(), time.monotonic()
        guards = [each for each in children(self.launcher.pid) if children(each)]
        os.kill(children(random.choice(guards))[0], signal.SIGKILL)
        for _ in self.waiting():
            if self.restarts() > restarts:
                break
        restarted = time.monotonic() - began
        self.next_step()
        return restarted, time.monotonic() - began

    def waiting(self) -> Iterator[None]:
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while time.monotonic() < deadline and self.launcher.poll() is None:
            yield
            time.sleep(0.01)
        raise SystemExit(f"no progress:\n{self._said.read_text(errors='replace')[-3000:]}")


def measure(kills: int, every: float, env: dict[str, str]) -> dict[str, Any]:
    """Return the figures of a job that is killed so many times, every so many seconds."""
    restarted, recovered = [], []
    with tempfile.TemporaryDirectory(prefix="replicax-restart-") as folder:
        job = Job(Path(folder), 10**8, env)
        try:
            job.next_step()
            for _ in range(kills):
                time.sleep(every)
                until_restart, until_step = job.kill_one()
                print(f"restarted after {until_restart:.1f} s, next step after {until_step:.1f} s")
                restarted.append(until_restart)
                recovered.append(until_step)
            time.sleep(every)
        finally:
            job.launcher.terminate()
            job.launcher.wait()
        spent = read_goodput(job.run / "goodput.jsonl")
    assert spent is not None
    return {
        "seconds_to_restart": restarted,
        "seconds_to_next_step": recovered,
        "median_seconds_to_next_step": statistics.median(recovered),
        "spread_seconds_to_next_step": [min(recovered), max(recovered)],
        "productive_of_run": spent.productive_fraction,
        "productive_of_clock": spent.clock_fraction,
        "seconds": {**spent.seconds, "between starts": spent.down_seconds},
        "load_average": os.getloadavg(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--every", type=float, default=60.0, help="seconds of training between")
    parser.add_argument("--busy", action="store_true", help="others use the machine meanwhile")
    given = parser.parse_args()
    result: dict[str, Any] = {
        "kills": given.kills,
        "seconds_between_kills": given.every,
        "machine_was_busy": given.busy,
    }
    for name, env in CASES.items():
        result[name] = measure(given.kills, given.every, env)
        print(name, result[name])
    save("restart", {**environment(), **result})


if __name__ == "__main__":
    main()
