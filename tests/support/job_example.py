"""Runs a program with an `rx.Run` and kills it: `PROGRAM STEP SECONDS FLAGS...`.

SIGKILL comes at the dispatch of `STEP`, or `SECONDS` after the start if that is earlier; 0 is
never. A run that ends prints `{"state": digest, "hooks": ..., "records": ...}` last.
"""

import json
import os
import runpy
import signal
import sys
import threading
from typing import Any
from unittest import mock

from support.resumable import told

import replicax as rx
from replicax.train.files.fingerprint import sha256


def end() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Kill(rx.Hook):
    """Ends the process at a step, or some time after the run has begun."""

    def __init__(self, step: int, seconds: float) -> None:
        self._step, self._seconds = step, seconds

    def start(self, run: Any) -> None:
        if self._seconds:
            timer = threading.Timer(self._seconds, end)
            timer.daemon = True
            timer.start()

    def dispatched(self, run: Any, step: Any) -> None:
        if step.place.step == self._step:
            end()


def main() -> None:
    program, step, seconds, *flags = sys.argv[1:]
    runs: list[rx.Run] = []

    def make(*arguments: Any, hooks: Any = (), **settings: Any) -> rx.Run:
        killed = [*hooks, Kill(int(step), float(seconds))]
        runs.append(run_class(*arguments, hooks=killed, **settings))
        return runs[-1]

    run_class = rx.Run
    sys.argv = [program, *flags]
    no_curves = mock.patch("replicax.train.hooks.curves.start_drawing")  # takes longer than the run
    with no_curves, mock.patch.object(rx, "Run", make):
        runpy.run_path(program, run_name="__main__")
    (run,) = runs
    ended = {
        "state": sha256(run.result.state),
        "hooks": run.hooks.save_state(run.place.step),
        "records": told(run.result.records),
        "failed": run.result.failed_hooks,
    }
    print(json.dumps(ended), flush=True)


if __name__ == "__main__":
    main()
