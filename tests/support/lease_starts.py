"""Starts of a run that hold its lease."""

import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

import replicax
from replicax.errors import RunInUseError
from replicax.train.files.lease import take_lease

# Without `replicax/__init__.py`, which loads jax: a second for each process, and threads
# that a fork must not meet.
PRELUDE = f"""
import os, sys, time, types
package = types.ModuleType("replicax")
package.__path__ = [{str(Path(replicax.__file__).parent)!r}]
sys.modules["replicax"] = package
from pathlib import Path
from replicax.train.files import lease
from replicax.train.files.lease import take_lease
assert not {{"jax", "numpy"}} & set(sys.modules)
folder = Path(sys.argv[1])
"""
HOLDS = """
held = take_lease(folder)
print(held.token, flush=True)
sys.stdin.readline()
held.check()
print("unharmed", flush=True)
"""
AT_ONCE_SECONDS = 1.0


class Start:
    """A process that runs a program with the run's folder as its argument."""

    def __init__(self, program: str, folder: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", PRELUDE + program, str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.pid = self.process.pid

    def line(self) -> str:
        assert self.process.stdout
        return self.process.stdout.readline().strip()

    def go_on(self) -> None:
        assert self.process.stdin
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


def move(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make this process appear to be on another host."""
    monkeypatch.setattr(socket, "gethostname", lambda: "other-host")


def file_of(run: Path, token: int) -> Path:
    (file,) = (run / "lease").glob(f"{token:08d}-*.json")
    return file


def refused(run: Path) -> str:
    with pytest.raises(RunInUseError) as error:
        take_lease(run)
    assert "\n" not in str(error.value)
    return str(error.value)


class Watch:
    """Measures the seconds of a block, and those that it slept."""

    seconds = slept = 0.0

    def __enter__(self) -> "Watch":
        self.since, self._sleep = time.monotonic(), time.sleep
        time.sleep = self._sleeping
        return self

    def __exit__(self, *_: object) -> None:
        time.sleep = self._sleep
        self.seconds = time.monotonic() - self.since

    def _sleeping(self, seconds: float) -> None:
        self.slept += seconds
        self._sleep(seconds)
