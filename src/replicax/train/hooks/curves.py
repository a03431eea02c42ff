"""Have the curves of a run drawn by another process, which takes nothing from the training."""

import atexit
import contextlib
import importlib.util
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

from replicax.errors import missing
from replicax.train.files.records import Record
from replicax.train.hooks.drawing import CURVES
from replicax.train.hooks.hook import Hook, Running

_NICEST = 19
_PATIENCE_SECONDS = 20.0


class Curves(Hook):
    """Has `curves.png` drawn in the run's folder, once a minute and at the end.

    One process at a time draws what `records.jsonl` has, which in an object store are the records
    up to the last checkpoint. The run does not wait for it, not even at its end: the picture of the
    end comes some seconds later. At a terminal the program may be over by then; elsewhere its exit
    waits, as a launcher, a scheduler or a container ends all that it leaves behind.
    """

    def __init__(self, seconds: float = 60.0) -> None:
        self._seconds = seconds
        self._begun_at = time.monotonic()
        self._drawing: subprocess.Popen[bytes] | None = None

    def start(self, run: Running) -> None:
        self._begun_at = time.monotonic()

    def record(self, run: Running, record: Record) -> None:
        if run.folder is None or time.monotonic() - self._begun_at < self._seconds:
            return
        # One that failed has said why; the end tries again.
        if _can_draw() and (self._drawing is None or self._drawing.poll() == 0):
            self._begun_at = time.monotonic()
            self._drawing = start_drawing(run.folder)

    def end(self, run: Running) -> None:
        if run.folder is None or not run.records:
            return
        if _can_draw():
            start_drawing(run.folder, last=True)  # it waits for the one before it
        else:
            run.say(f"no {CURVES}: {missing('matplotlib', 'cli')}")


def start_drawing(folder: Path, *, last: bool = False) -> subprocess.Popen[bytes]:
    """Start a process that draws the run in `folder`, and prints what fails to stderr.

    If it is the `last` one, and stderr is no terminal, the exit of this process waits for it.
    """
    drawing = subprocess.Popen(
        [sys.executable, "-P", "-m", "replicax.train.hooks.drawing", os.fspath(folder)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "JAX_PLATFORMS": "cpu"},
        start_new_session=True,  # Ctrl-C is for the run
    )
    if hasattr(os, "setpriority"):  # Windows has none
        os.setpriority(os.PRIO_PROCESS, drawing.pid, _NICEST)
    if last and not (sys.stderr is not None and sys.stderr.isatty()):
        atexit.register(_wait, drawing)
    # Whoever ends first: a process that is waited for leaves no zombie, and no warning.
    threading.Thread(target=drawing.wait, name="replicax-curves", daemon=True).start()
    return drawing


def _wait(drawing: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(subprocess.TimeoutExpired):
        drawing.wait(_PATIENCE_SECONDS)


def _can_draw() -> bool:
    return importlib.util.find_spec("matplotlib") is not None
