"""A launched run of islands or of one job, whose processes are killed, and the times of its steps.

For islands_goodput.py and islands_deaths.py.
"""

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from replicax.cluster.variables import PROCESS_ID
from replicax.core.modes.exact.exact_mode import MICRO_SHARDS
from replicax.core.modes.exact.fixed_tree import THREADS_VARIABLE
from replicax.islands.island_variables import ISLAND

PROGRAM = Path(__file__).with_name("islands_fit.py")
COUNT = 3
STARTS_WITHIN_SECONDS = 300.0
GRACE_SECONDS = 5.0
"""For a run that is closed."""
POLL_SECONDS = 0.02
_TAIL_BYTES = 400
IMAGES = Path(__file__).resolve().parents[1] / "docs" / "images"


@dataclasses.dataclass(frozen=True)
class Step:
    """A step that a process has finished."""

    at: float
    """Seconds since 1970."""
    number: int
    """Counted from 1."""
    live: int
    """Islands in the group, or processes of the job."""
    writes: bool
    """Whether this process writes the run's files."""


@dataclasses.dataclass
class Start:
    """One start of an island, or of a process of a job."""

    number: int
    pid: int
    began: float
    """When the process was created."""
    steps: list[Step]


@dataclasses.dataclass(frozen=True)
class Kill:
    """A SIGKILL to a process."""

    at: float
    number: int
    pid: int


class LaunchedRun:
    """`replicax launch` of islands, or of one job that restarts as a whole."""

    def __init__(
        self, folder: Path, *, islands: bool, steps: int, rows: int, save_seconds: float, mode: str
    ) -> None:
        self.folder, self._said = folder, folder / "launcher.txt"
        self.kills: list[Kill] = []
        many = ["--islands" if islands else "--processes", str(COUNT), "--restarts", "1000000"]
        launch = [sys.executable, "-m", "replicax", "launch", *many, "--grace", str(GRACE_SECONDS)]
        launch += ["--logs", str(folder / "logs")]
        program = [sys.executable, str(PROGRAM), str(folder), mode, str(steps), str(rows)]
        env = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"}
        if mode == "exact":  # which requires it on CPUs
            env[THREADS_VARIABLE] = str(MICRO_SHARDS)
        with self._said.open("wb") as said:
            self._launcher = subprocess.Popen(
                [*launch, "--", *program, str(save_seconds)],
                stdout=said,
                stderr=said,
                stdin=subprocess.DEVNULL,
                env=env,
                start_new_session=True,
            )

    @property
    def ended(self) -> bool:
        return self._launcher.poll() is not None

    @property
    def said(self) -> str:
        """What the launcher printed."""
        return self._said.read_text(errors="replace")

    def live(self) -> dict[int, int]:
        """Return the process ID of each process that runs, by the number of its island or rank."""
        found = {}
        for guard in _children(self._launcher.pid):
            for pid in _children(guard):
                if (number := _number(pid)) is not None:
                    found[number] = pid
        return found

    def kill(self, number: int) -> bool:
        """Kill a process; return whether it ran, once it does not."""
        pid = self.live().get(number)
        if pid is None:
            return False
        at = time.time()
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            return False
        self.kills.append(Kill(at, number, pid))
        while self.live().get(number) == pid:
            time.sleep(POLL_SECONDS / 4)
        return True

    def newest(self) -> dict[int, Step]:
        """Return the newest step of each start that has done one, by process ID."""
        found = {}
        for path in self.folder.glob("times-*.jsonl"):
            if (step := _last_step(path)) is not None:
                found[int(path.stem.rpartition("-")[2])] = step
        return found

    def wait(self, until: Callable[[], bool], what: str, seconds: float) -> None:
        """Return once `until` holds."""
        deadline = time.monotonic() + seconds
        while not until():
            if self.ended or time.monotonic() > deadline:
                raise SystemExit(f"no {what} within {seconds:g} s:\n{self.said[-3000:]}")
            time.sleep(POLL_SECONDS)

    def wait_for_all(self) -> None:
        """Return once all processes have done a step and know of each other."""

        def all_step() -> bool:
            newest, live = self.newest(), self.live()
            steps = [newest.get(pid) for pid in live.values()]
            return len(live) == COUNT and all(s is not None and s.live == COUNT for s in steps)

        self.wait(all_step, f"step of {COUNT}", STARTS_WITHIN_SECONDS)

    def starts(self) -> list[Start]:
        """Return all starts with their steps, in order of time."""
        found = []
        for path in self.folder.glob("times-*.jsonl"):
            lines = [json.loads(line) for line in _whole_lines(path)]
            if lines:
                steps = [Step(*line) for line in lines[1:]]
                found.append(Start(**lines[0], steps=steps))
        return sorted(found, key=lambda start: start.began)

    def close(self) -> None:
        """Stop the run, if it has not ended."""
        if not self.ended:
            self._launcher.terminate()
        self._launcher.wait()


def _children(pid: int) -> list[int]:
    with contextlib.suppress(OSError):
        return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


def _number(pid: int) -> int | None:
    """Return the number of an island, or the rank of a process, from its environment."""
    with contextlib.suppress(OSError):
        text = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace")
        pairs = dict(each.partition("=")[::2] for each in text.split("\0"))
        if (value := pairs.get(ISLAND, pairs.get(PROCESS_ID))) is not None:
            return int(value)
    return None


def _whole_lines(path: Path) -> Iterator[str]:
    text = path.read_text(encoding="utf-8")
    yield from text[: text.rfind("\n") + 1].splitlines()  # without one that a kill cut off


def _last_step(path: Path) -> Step | None:
    with path.open("rb") as file:
        file.seek(max(file.seek(0, os.SEEK_END) - _TAIL_BYTES, 0))
        lines = file.read().decode().split("\n")[:-1]
    if lines and lines[-1].startswith("["):
        return Step(*json.loads(lines[-1]))
    return None
