"""Switches off one defence of the product inside the job, to show that a trial then fails."""

import dataclasses
import itertools
import time
from collections.abc import Callable
from typing import Any


@dataclasses.dataclass(frozen=True)
class Defence:
    """A mechanism that protects a run."""

    what: str
    fault: str
    """The kind of fault that it protects against."""
    off: Callable[[], None]
    """Patches the product in this process to switch the defence off."""
    processes: int | None = None
    """Processes of a run that needs it; None for any number."""


def switch_off(name: str) -> None:
    """Switch off the defence `name`; `""` switches off none."""
    if name:
        DEFENCES[name].off()


def _verification() -> None:
    from replicax.train.checkpoints import store

    store.verify_checkpoint = lambda *arguments: None  # type: ignore[assignment]


def _fallback() -> None:
    from replicax.train.checkpoints.store import Store

    paths = Store.paths
    Store.paths = lambda self: paths(self)[-1:]  # type: ignore[method-assign]


def _lease() -> None:
    from replicax.train.folder import storage

    class Nobodys:
        token = int(time.time() * 1000)

        def check(self) -> None: ...
        def release(self) -> None: ...

    storage.take_lease = lambda folder: Nobodys()  # type: ignore[assignment]


def _guard() -> None:
    from replicax.train import guarded

    judge = guarded._judge

    def lenient(*arguments: Any) -> Any:
        judged, losses = judge(*arguments)
        return {name: verdict & False for name, verdict in judged.items()}, losses

    guarded._judge = lenient


def _records_rewind() -> None:
    from replicax.train.files.records import RunFolder

    keep = RunFolder.keep

    def everything(self: Any, lines: int, digest: str | None = None, **options: bool) -> Any:
        return keep(self, max(lines, len(self._lines.contents().splitlines())), **options)

    RunFolder.keep = everything  # type: ignore[method-assign]


def _agreed_stop() -> None:
    from replicax.train.run.stopping import Stopping

    Stopping.signal = property(lambda self: self._interrupt.signal)  # type: ignore[method-assign]
    Stopping.vote = lambda self, **how: self.over  # type: ignore[method-assign]


def _position() -> None:
    from replicax.train.run import run_state

    run_state.first_batch = lambda *arguments: 0  # type: ignore[assignment]


def _atomic_rename() -> None:
    from replicax.train.checkpoints.store import Store

    numbers = itertools.count(2)

    def in_place(self: Any, step: int, token: int, number: int) -> Any:
        path = self.folder / str(step)
        return path.with_name(f"step-{step:09d}.{next(numbers)}") if path.exists() else path

    Store.temporary = in_place  # type: ignore[method-assign]
    Store.commit = lambda *arguments: None  # type: ignore[method-assign]


def _sigterm() -> None:
    from replicax.train.run import run_parts
    from replicax.train.run.stopping import Interrupt

    run_parts.Interrupt = lambda **options: Interrupt(terminate=False)  # type: ignore[assignment, misc]


def _final_save() -> None:
    from replicax.train.folder.written_folder import WrittenFolder

    WrittenFolder.finish = lambda *arguments: None  # type: ignore[method-assign]


def _failed_saves() -> None:
    from replicax.train.checkpoints.saver import Saver

    def forget(self: Any) -> None:
        self._failed = None

    Saver._judge = forget  # type: ignore[method-assign]


def _watchdog() -> None:
    from replicax.cluster import join
    from replicax.cluster.watchdog import Timeouts

    join.read_timeouts = lambda env: Timeouts(silent_seconds=3600.0)  # type: ignore[assignment]


DEFENCES = {
    "verification": Defence("checksums of all files", "corrupt", _verification),
    "fallback": Defence("older checkpoints where the newest is bad", "corrupt", _fallback),
    "lease": Defence("one start of a run at a time", "second-start", _lease),
    "guard": Defence("updates that are not finite are skipped", "nan-one", _guard),
    "records-rewind": Defence("records of lost steps are taken back", "kill", _records_rewind),
    "position": Defence("the exact batch to go on with", "kill", _position),
    "atomic-rename": Defence("a checkpoint appears whole", "kill", _atomic_rename, processes=1),
    "sigterm": Defence("SIGTERM is heard", "term", _sigterm),
    "final-save": Defence("a run that stops is saved", "term", _final_save),
    "agreed-stop": Defence("all processes stop at one step", "term", _agreed_stop, processes=2),
    "failed-saves": Defence("saves that fail are told, and counted", "io-error", _failed_saves),
    "watchdog": Defence("frozen processes are found", "freeze", _watchdog),
}
