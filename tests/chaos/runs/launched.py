"""The same faults under `replicax launch`, which restarts everything by itself."""

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator

from chaos.runs.sizes import STEPS
from chaos.runs.trial import MOST_STARTS, Trial

_SECONDS = 180.0


def launched(trial: Trial) -> None:
    """Kill one or all processes of `replicax launch`, once or twice."""
    kills = trial.chance.choice((1, 1, 2))
    with _launcher(trial) as launcher:
        for number in range(1, kills + 1):
            if not _strike(trial, launcher, number):
                break
        with contextlib.suppress(subprocess.TimeoutExpired):
            launcher.wait(_SECONDS)
    trial.check(launcher.returncode == 0, f"replicax launch ended with {launcher.returncode}")
    trial.missed = not trial.told
    left = [pid for pid in _pids(trial) if _lives(pid)]
    trial.check(not left, f"processes left behind: {left}")
    for pid in left:
        os.kill(pid, signal.SIGKILL)


def _strike(trial: Trial, launcher: "subprocess.Popen[bytes]", starts: int) -> bool:
    """Kill processes of the newest start at any step; False if the run had already finished."""
    step, delay = trial.chance.randrange(STEPS + 1), trial.chance.uniform(0, 0.05)
    everyone, one = trial.chance.random() < 1 / 3, trial.chance.randrange(trial.processes)

    def due() -> bool:
        pids = _pids(trial)
        mine = pids[(starts - 1) * trial.processes :]
        return len(mine) >= trial.processes and _step(trial, mine) >= step

    deadline = time.monotonic() + _SECONDS
    while not due():
        if launcher.poll() is not None or time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    time.sleep(delay)
    mine = _pids(trial)[-trial.processes :]
    victims = mine if everyone else [mine[one]]
    trial.say(f"kill {'all' if everyone else one} at step {_step(trial, mine)}")
    struck_at = time.time()
    for pid in victims:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    recorded = trial.disk().recorded
    while launcher.poll() is None and time.monotonic() < deadline:
        again = _pids(trial)[starts * trial.processes :]
        for pid in again:
            restored, stepped = (trial.notes / f"{pid}.{each}" for each in ("restored", "stepped"))
            if stepped.exists():
                trial.lost.append(max(recorded - json.loads(restored.read_text())["step"], 0))
                told = json.loads(stepped.read_text())
                trial.recovery_seconds.append(told["time"] - struck_at)
                return True
        time.sleep(0.01)
    return False


@contextlib.contextmanager
def _launcher(trial: Trial) -> "Iterator[subprocess.Popen[bytes]]":
    options = "--processes", str(trial.processes), "--restarts", str(MOST_STARTS)
    launcher = trial.launcher(*options, arguments=(trial.data,))
    try:
        yield launcher
    finally:
        launcher.kill()  # its processes die with it
        launcher.wait()


def _pids(trial: Trial) -> list[int]:
    """Return the pids of all processes so far, in the order of their starts."""
    notes = trial.notes.glob("*.started")
    return [int(path.stem) for path in sorted(notes, key=lambda path: path.stat().st_mtime)]


def _step(trial: Trial, pids: list[int]) -> int:
    return max((trial.last_step(str(pid)) for pid in pids), default=0)


def _lives(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False
