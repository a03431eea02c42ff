"""The runner of trials of any kind: a pool of threads, a fork server, a folder for each trial."""

import concurrent.futures
import contextlib
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any

from chaos.results import Outcome
from support.fork_server import ForkServer

TESTS = Path(__file__).resolve().parents[1]
_MOST_ATTEMPTS = 4
_OURS = ("REPLICAX_", "XLA_", "JAX_", "CHAOS_")


class Harness:
    """Runs trials, several at a time, and keeps only the folders of failed ones.

    Args:
        threads: that each process computes with.
        base: the folder of its folder; None for the usual one.
    """

    faults: Mapping[str, Any]
    whose = "the undisturbed run"
    """In words, who has the bits that are expected."""

    def __init__(self, threads: int, base: str | None = None) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="replicax-chaos-", dir=base))
        path = os.pathsep.join(filter(None, [str(TESTS), os.environ.get("PYTHONPATH", "")]))
        kept = {name: text for name, text in os.environ.items() if not name.startswith(_OURS)}
        ours = {"JAX_PLATFORMS": "cpu", "NPROC": str(threads), "OPENBLAS_NUM_THREADS": "1"}
        self.server = ForkServer({**kept, **ours, "PYTHONPATH": path})
        self._failed = False

    def __enter__(self) -> "Harness":
        return self

    def __exit__(self, *exception: object) -> None:
        self.server.close()
        if self._failed:
            print(f"the folders of failed trials are in {self.folder}")
        else:
            shutil.rmtree(self.folder, ignore_errors=True)

    def run(
        self,
        faults: Sequence[str],
        trials: int,
        seed: int,
        jobs: int = 1,
        without: str | None = None,
    ) -> list[Any]:
        """Return the outcomes of `trials` trials.

        Args:
            faults: kinds, which take turns.
            trials: how many.
            seed: of the first; the others count on.
            jobs: trials at a time.
            without: a defence to switch off; it is enough then that one trial fails.
        """
        outcomes: list[Outcome] = []
        with concurrent.futures.ThreadPoolExecutor(jobs) as executor:
            todo = [
                executor.submit(self._one, faults[number % len(faults)], number, without)
                for number in range(seed, seed + trials)
            ]
            try:
                for done in concurrent.futures.as_completed(todo):
                    outcomes.append(done.result())
                    self._failed |= bool(outcomes[-1].wrong)
                    print(outcomes[-1].line(), flush=True)
                    self.note(outcomes[-1])
                    if without and outcomes[-1].wrong:
                        break
            finally:
                executor.shutdown(cancel_futures=True)
        return outcomes

    def _one(self, fault: str, seed: int, without: str | None) -> Outcome:
        """Run one trial, again if its fault came too late."""
        for attempt in range(_MOST_ATTEMPTS):
            outcome = self._try(fault, seed, attempt, without)
            if outcome.wrong or not outcome.missed:
                break
        return outcome

    def _try(self, fault: str, seed: int, attempt: int, without: str | None) -> Outcome:
        began = time.monotonic()
        folder = self.folder / f"{fault}-{seed}-{attempt}"
        with self.trial(folder, fault, seed, attempt, without) as trial:
            try:
                self.disturb(trial, self.faults[fault])
            except Exception as error:  # what a broken run leaves may be unreadable
                trial.wrong.append(f"{type(error).__name__}: {error}")
            finally:
                trial.close()
            outcome = self.outcome(
                trial,
                fault=fault,
                seed=seed,
                how="; ".join(trial.told),
                seconds=time.monotonic() - began,
                cpu_seconds=sum(child.cpu_seconds for child in trial.children),
                wrong=trial.wrong,
            )
        if not outcome.wrong:
            shutil.rmtree(folder, ignore_errors=True)
        return outcome

    def trial(
        self, folder: Path, fault: str, seed: int, attempt: int, without: str | None
    ) -> contextlib.AbstractContextManager[Any]:
        """A trial in `folder`, ready to begin."""
        raise NotImplementedError

    def disturb(self, trial: Any, fault: Any) -> None:
        """Start the run of a trial, disturb it up to its end, and check what came of it."""
        raise NotImplementedError

    def outcome(self, trial: Any, **told: Any) -> Outcome:
        """Return the outcome of a trial, of which `told` is known."""
        raise NotImplementedError

    def note(self, outcome: Any) -> None:
        """Called with each outcome."""


class Once:
    """Values, each of which the first thread that asks makes, while others that ask wait."""

    def __init__(self) -> None:
        self._known: dict[Hashable, Any] = {}
        self._making = threading.Lock()

    def of(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """Return the value of `key`."""
        with self._making:
            if key not in self._known:
                self._known[key] = make()
            return self._known[key]
