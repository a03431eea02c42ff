"""Send hostile messages and connections to the port of a real job of two processes.

Checks that the job goes on and prints nothing, and measures how much the memory of process 0
grows. Writes `results/strangers.json`. `tests/support/strangers.py` has what the strangers do.
"""

import argparse
import contextlib
import os
import re
import resource
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from timing import environment, save

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from support.cluster_jobs import free_port  # noqa: E402
from support.strangers import Strangers  # noqa: E402
from support.waiting import until  # noqa: E402

JOB = ROOT / "tests" / "support" / "strangers_job.py"
PROCESSES = 2
DESCRIPTORS = 256
IDLE, LARGE, LARGE_BYTES = 300, 12, 60_000_000
MOST_MEGABYTES = 64.0
SETTLE_SECONDS = 3.0
EXPECTED = re.compile(r"replicax: process 0 of 2 \(|\[Gloo\] |\d+$")
"""What the processes print anyway: where they are, and the number of rounds."""


class RealJob:
    """A job of two processes with a secret, each with at most `DESCRIPTORS` open files."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.port, self.id = folder, free_port(), secrets.token_hex(8)
        secret = secrets.token_urlsafe()
        self._processes = [self._start(process, secret) for process in range(PROCESSES)]
        until(lambda: self.rounds > 0 or self.ended)

    def _start(self, process: int, secret: str) -> subprocess.Popen[bytes]:
        env = {
            "JAX_PLATFORMS": "cpu",
            "REPLICAX_PROCESSES": str(PROCESSES),
            "REPLICAX_PROCESS_ID": str(process),
            "REPLICAX_COORDINATOR": f"127.0.0.1:{self.port}",
            "REPLICAX_JOB_ID": self.id,
            "REPLICAX_SECRET": secret,
        }
        with self._output(process).open("wb") as output:
            return subprocess.Popen(
                [sys.executable, str(JOB), str(self.folder)],
                env={**os.environ, **env},
                stdout=output,
                stderr=subprocess.STDOUT,
                preexec_fn=lambda: resource.setrlimit(
                    resource.RLIMIT_NOFILE, (DESCRIPTORS, DESCRIPTORS)
                ),
            )

    def _output(self, process: int) -> Path:
        return self.folder / f"output-{process}"

    @property
    def ended(self) -> bool:
        """Whether a process has ended."""
        return any(process.poll() is not None for process in self._processes)

    @property
    def rounds(self) -> int:
        """Number of gathered values so far."""
        path = self.folder / "rounds-1"
        return int(path.read_text()) if path.exists() else 0

    def megabytes(self, name: str = "VmRSS") -> float:
        """Memory of process 0: `VmRSS` now, `VmHWM` at most."""
        status = Path(f"/proc/{self._processes[0].pid}/status").read_text()
        line = next(line for line in status.splitlines() if line.startswith(name))
        return int(line.split()[1]) / 1024

    def end(self) -> dict[str, Any]:
        """End the job, and return how its processes ended."""
        (self.folder / "stop").touch()
        codes = [process.wait(60) for process in self._processes]
        texts = [self._output(p).read_text(errors="replace") for p in range(PROCESSES)]
        return {"exit_codes": codes, "output": [text.splitlines() for text in texts]}

    def kill(self) -> None:
        """Leave nothing behind."""
        for process in self._processes:
            process.kill()
            process.wait()


@contextlib.contextmanager
def real_job() -> Iterator[RealJob]:
    """A job, and nothing of it afterwards."""
    with tempfile.TemporaryDirectory(prefix="replicax-strangers-") as folder:
        job = RealJob(Path(folder))
        try:
            yield job
        finally:
            job.kill()


def messages(job: RealJob, count: int, seed: int) -> dict[str, Any]:
    """Strangers of all kinds come, `count` in all."""
    strangers = Strangers(job.port, job.id, PROCESSES, seed)
    for number in range(count):
        strangers.come()
        if number % 1000 == 999:
            print(f"  {number + 1:,} strangers, {job.megabytes():.0f} MB", flush=True)
    strangers.leave()
    told = {"turned_away_while_they_spoke": strangers.refused, "let_in": strangers.let_in}
    return {"count": count, "seed": seed, **told}


def idle(job: RealJob) -> dict[str, Any]:
    """Many connect and say nothing."""
    opened = [socket.create_connection(("127.0.0.1", job.port)) for _ in range(IDLE)]
    time.sleep(SETTLE_SECONDS)
    for each in opened:
        each.close()
    return {"count": IDLE, "descriptors": DESCRIPTORS}


def large(job: RealJob) -> dict[str, Any]:
    """Some send a line that does not end."""
    sent = 0
    for _ in range(LARGE):
        stranger = socket.create_connection(("127.0.0.1", job.port))
        with stranger, contextlib.suppress(OSError):
            for _ in range(LARGE_BYTES // 1_000_000):
                stranger.sendall(b"x" * 1_000_000)
                sent += 1_000_000
    return {"count": LARGE, "bytes_each": LARGE_BYTES, "megabytes_sent": sent // 1_000_000}


def measured(job: RealJob, attack: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return what an attack did to the job."""
    before, rounds, started = job.megabytes(), job.rounds, time.monotonic()
    found = attack()
    seconds = time.monotonic() - started
    return {
        **found,
        "seconds": round(seconds, 1),
        "rounds_of_the_job": job.rounds - rounds,
        "growth_megabytes": round(job.megabytes() - before, 1),
        "most_growth_megabytes": round(job.megabytes("VmHWM") - before, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--messages", type=int, default=10_000, help="strangers in all (10000)")
    parser.add_argument("--seed", type=int, default=0, help="seed of what they do (0)")
    parser.add_argument("--dry", action="store_true", help="write no file")
    options = parser.parse_args()
    result: dict[str, Any] = {"environment": environment(), "processes": PROCESSES}
    with real_job() as job:
        time.sleep(SETTLE_SECONDS)
        result["megabytes_before"] = round(job.megabytes(), 1)
        for name, attack in (
            ("idle", lambda: idle(job)),
            ("large", lambda: large(job)),
            ("messages", lambda: messages(job, options.messages, options.seed)),
        ):
            result[name] = measured(job, attack)
            print(f"{name}: {result[name]}", flush=True)
        alone, started = job.rounds, time.monotonic()
        time.sleep(SETTLE_SECONDS)
        pace = (job.rounds - alone) / (time.monotonic() - started)
        result["rounds_per_second_alone"] = round(pace, 1)
        most = job.megabytes("VmHWM") - result["megabytes_before"]
        result["most_growth_megabytes"] = round(most, 1)
        result |= job.end()
    said = [line for lines in result.pop("output") for line in lines if not EXPECTED.match(line)]
    result["lines_about_strangers"] = len(said)
    print(*said[:20], sep="\n")
    unharmed = result["exit_codes"] == [0] * PROCESSES and not said
    unharmed = unharmed and not result["messages"]["let_in"]
    print(f"job {'unharmed' if unharmed else 'HARMED'}, process 0 grew by at most {most:.1f} MB")
    if not options.dry:
        save("strangers", result)
    sys.exit(not (unharmed and most < MOST_MEGABYTES))


if __name__ == "__main__":
    main()
