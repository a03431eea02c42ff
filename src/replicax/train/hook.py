"""Hooks: what observes a run on its way, and may ask something of it."""

import inspect
import json
import time
import traceback
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, Protocol

from replicax.core.accumulate import Apply
from replicax.core.batch import Batch
from replicax.core.data_parallel import DataParallel
from replicax.core.sources import Source
from replicax.core.update import TrainState
from replicax.errors import ConfigError, ReplicaxError
from replicax.train.dispatched import Dispatched, RunPosition
from replicax.train.records import Record
from replicax.wording import first_line


class Running(Protocol):
    """A run as its hooks see it; an `rx.Run` is one."""

    dp: DataParallel
    """Does the steps; bad ones are skipped in it."""
    source: Source
    state: TrainState
    """After the newest step; the next one may donate it. A hook may put another in its place."""
    place: RunPosition
    """Where the run stands: steps, epoch, batches of it."""
    records: list[Record]
    """Records of the whole run."""
    config: dict[str, Any]
    """The contents of `config.json`."""
    epochs: int | None
    """Passes over the source; None where the run is so many steps."""
    total: int | None
    """Steps that the run is to have, where that is known."""
    error: BaseException | None
    """The exception that ended the run, in `Hook.end`."""

    @property
    def folder(self) -> Path | None:
        """The run's folder; None where it has none, and in processes other than 0.

        Of a run in an object store it is an `etils.epath.Path`, which reads and writes alike.
        """

    @property
    def is_main(self) -> bool:
        """Whether this process writes and prints for all."""

    def say(self, line: str) -> None:
        """Print a line that stays; in process 0 alone, and not where `progress` is off."""

    def keep(self, record: Record) -> None:
        """Add a record of the hook's own kind."""

    def stop(self, why: str) -> None:
        """Ask that the run ends here, as if it were done."""

    def save(self) -> None:
        """Ask for a checkpoint."""

    def evaluate(self) -> None:
        """Ask for an evaluation."""

    def wait(self) -> None:
        """Ask, in `dispatched`, that this step is waited for before the next one is given."""

    def go_back(
        self, state: TrainState, place: RunPosition, why: str, metrics: dict[str, float]
    ) -> None:
        """Ask, in `settle`, that the run goes on from an earlier `state` at `place`.

        It must be the last one that `note_good` was called at.
        """

    def note_good(self) -> None:
        """Note, in `start` or `settle`, that this is a place to come back to."""


class Hook:
    """Something that a run calls on its way: override what you need, the rest costs nothing.

    In a job of several processes each has the hook and calls it alike; who writes or prints asks
    `run.is_main` first. What is asked of a run (`stop`, `save`, `evaluate`) is done after the step
    that is under way.

    A hook that raises a `ReplicaxError` ends the run with it. One that raises anything else is
    named, and left out from there on: the run goes on.

    Examples:
        >>> class Print(rx.Hook):
        ...     def record(self, run, record):
        ...         print(record.kind, record.step, record.metrics)
        >>> rx.fit(dp, state, source, batch_size=32, epochs=1, hooks=[Print()])
    """

    @property
    def name(self) -> str:
        """The hook in messages, in the time that it took, and in checkpoints; no two are alike."""
        return type(self).__name__

    @property
    def pinned(self) -> Collection[int]:
        """Steps whose checkpoints stay, however many there are."""
        return ()

    @property
    def wrap(self) -> Callable[[Apply], Apply] | None:
        """A function that wraps the optimizer's part of the step, to add metrics; None for none."""
        return None

    def start(self, run: Running) -> None:
        """The run is about to begin, or to go on from where it was saved."""

    def before_step(self, run: Running, batch: Batch) -> None:
        """`run.state` is about to be given to the step on `batch`, which may donate it."""

    def dispatched(self, run: Running, step: Dispatched) -> None:
        """A step was given to the devices, and `run.state` is what comes of it."""

    def step(self, run: Running, step: Dispatched) -> None:
        """The next step has finished, some steps after it was dispatched.

        Reading its `metrics` waits for nothing.
        """

    def settle(self, run: Running, due: bool) -> None:
        """All hooks have seen the steps that have finished.

        Args:
            run: the run.
            due: whether `run.state` is about to be saved or evaluated, or the run to end.
        """

    def figures(self, run: Running, record: Record) -> dict[str, float]:
        """Return what `record`, of kind `train`, is to have among its `figures`."""
        return {}

    def record(self, run: Running, record: Record) -> None:
        """A record was added: of kind `train`, `eval`, `skip`, `noise`, or a hook's own."""

    def evaluation(self, run: Running, record: Record) -> None:
        """The run was evaluated; the record of it was added."""

    def epoch(self, run: Running, record: Record | None) -> None:
        """An epoch is over, or the run; `record` is that of the evaluation, where there is one."""

    def saving(self, run: Running) -> None:
        """A checkpoint is about to be taken."""

    def rewound(self, run: Running) -> None:
        """The run went back to an earlier step, where it stands now; what came after is no more."""

    def save_state(self) -> Any:
        """Return what a checkpoint is to hold for this hook, as JSON has it; None for nothing."""
        return None

    def load_state(self, state: Any) -> None:
        """Go on from what `save_state` returned, before `start`."""

    def summary(self) -> list[str]:
        """Return lines for the end of the run."""
        return []

    def end(self, run: Running) -> None:
        """The run is over: done, stopped, or failed with `run.error`. A file is closed here."""


_POINTS = [name for name, each in vars(Hook).items() if inspect.isfunction(each)]
"""Methods that a hook may override."""


class Hooks:
    """The hooks of a run: called in order and timed, left out once they fail."""

    def __init__(self, hooks: Sequence[Hook], say: Callable[[str], None]) -> None:
        self.seconds: dict[str, float] = {}
        """Name -> time that the loop spent in that hook."""
        self.failed: list[str] = []
        for hook in hooks:
            if not isinstance(hook, Hook):
                raise ConfigError(
                    f"a hook of type {type(hook).__name__}; a hook is an instance of a subclass of "
                    "rx.Hook: derive from it"
                )
            if hook.name in self.seconds:
                raise ConfigError(
                    f"two hooks are named {hook.name}; checkpoints tell them apart by it: give one "
                    "of them another `name`"
                )
            self.seconds[hook.name] = 0.0
        self._hooks, self._say = list(hooks), say
        self._at = {
            point: [
                each for each in hooks if getattr(type(each), point) is not getattr(Hook, point)
            ]
            for point in _POINTS
        }

    def __call__(self, point: str, run: Running, *arguments: Any) -> None:
        self._all(point, run.place.step, run, *arguments)

    def figures(self, run: Running, record: Record) -> dict[str, float]:
        found = self._all("figures", record.step, run, record).values()
        return {name: value for each in found for name, value in (each or {}).items()}

    def summary(self, step: int) -> list[str]:
        """Return the lines of all hooks, at the end of a run after `step`."""
        return [line for lines in self._all("summary", step).values() for line in lines or ()]

    @property
    def wraps(self) -> tuple[Callable[[Apply], Apply], ...]:
        return tuple(hook.wrap for hook in self._hooks if hook.wrap is not None)

    @property
    def pinned(self) -> set[int]:
        return {step for hook in self._hooks for step in hook.pinned}

    def save_state(self, step: int) -> dict[str, Any]:
        """Return what a checkpoint of `step` is to hold of all hooks."""
        states = self._all("save_state", step)
        return {name: state for name, state in states.items() if state is not None}

    def load_state(self, step: int, states: dict[str, Any]) -> None:
        """Go on from what `save_state` returned at `step`; a hook that is new begins anew."""
        for hook in tuple(self._at["load_state"]):
            if hook.name in states:
                self._call(hook, "load_state", step, states[hook.name])

    def _all(self, point: str, step: int, *arguments: Any) -> dict[str, Any]:
        """Call the hooks that have something to do at `point`; what they return, by their names."""
        return {each.name: self._call(each, point, step, *arguments) for each in [*self._at[point]]}

    def _call(self, hook: Hook, point: str, step: int, *arguments: Any) -> Any:
        started = time.perf_counter()
        try:
            found = getattr(hook, point)(*arguments)
            if point == "save_state":
                json.dumps(found, allow_nan=False)  # or the checkpoint could not hold it
            return found
        except ReplicaxError:
            raise
        except Exception as error:  # a hook's mistake is not the run's
            self._leave_out(hook, point, step, error)
            return None
        finally:
            self.seconds[hook.name] += time.perf_counter() - started

    def _leave_out(self, hook: Hook, point: str, step: int, error: Exception) -> None:
        self.failed.append(hook.name)
        for hooks in self._at.values():
            if hook in hooks:
                hooks.remove(hook)
        where = traceback.extract_tb(error.__traceback__)[-1]
        self._say(
            f"ALARM  hook {hook.name} failed in {point} at step {step:,} "
            f"({Path(where.filename).name}:{where.lineno}, {first_line(error)}); the run goes on "
            "without it"
        )
