"""Hooks: observers of a run that may request actions from it."""

import inspect
import json
import time
import traceback
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Protocol

from replicax.core.data.sources import Source
from replicax.core.data_parallel import DataParallel
from replicax.core.ground.train_state import TrainState
from replicax.core.step.base import Apply
from replicax.errors import ConfigError, ReplicaxError
from replicax.text.wording import first_line
from replicax.train.dispatched import Dispatched, RunPosition
from replicax.train.files.records import Record, as_floats


class Running(Protocol):
    """A run as its hooks see it; an `rx.Run` is one."""

    dp: DataParallel
    """Runs the steps, and skips bad ones."""
    source: Source
    state: TrainState
    """The state after the newest step; the next may donate it. A hook may replace it."""
    records: list[Record]
    """All records of the run."""
    config: dict[str, Any]
    """The contents of `config.json`."""
    epochs: int | None
    """Passes over the source; None if the length of the run is given in steps."""
    total: int | None
    """Total steps of the run, if known."""
    error: BaseException | None
    """The exception that ended the run, in `Hook.end`."""

    @property
    def place(self) -> RunPosition:
        """The current position: step, epoch, and batch within the epoch."""

    @property
    def folder(self) -> Path | None:
        """The run's folder; None if it has none, and in processes other than 0.

        For a run in an object store it is an `etils.epath.Path`, with the same interface.
        """

    @property
    def is_main(self) -> bool:
        """Whether this is the process that writes and prints."""

    resumable: bool
    """Whether the run saves checkpoints."""

    def evaluation_metrics(self) -> Collection[str] | None:
        """Return the names of the metrics of an evaluation; None if they are not known yet."""

    def say(self, line: str) -> None:
        """Print a permanent line; in process 0 only, and only if `progress` is on."""

    def alarm(self, line: str) -> None:
        """Print a line to stderr that must not be missed; in every process, always."""

    def keep(self, record: Record) -> None:
        """Add a record of a kind defined by the hook."""

    def stop(self, why: str) -> None:
        """Request the end of the run after this step, as if it were done."""

    def save(self) -> None:
        """Request a checkpoint."""

    def evaluate(self) -> None:
        """Request an evaluation."""

    def wait(self) -> None:
        """Request, in `dispatched`, to wait for this step before dispatching the next one."""

    def go_back(
        self, state: TrainState, place: RunPosition, why: str, metrics: dict[str, float]
    ) -> None:
        """Request, in `settle`, to continue from an earlier `state` at `place`.

        It must be the position of the last call of `note_good`.
        """

    def note_good(self) -> None:
        """Mark, in `start` or `settle`, the current position as one to go back to."""


if TYPE_CHECKING:
    from typing_extensions import TypeVar  # for the default, which Python 3.13 has

    RunT = TypeVar("RunT", bound=Running, contravariant=True, default=Any)
    """The run that a hook gets. For a subclass of `rx.Hook` it is an `rx.Run`."""
else:
    from typing import TypeVar

    RunT = TypeVar("RunT")


class Hook(Generic[RunT]):
    """Base class of hooks: override the methods you need; the others cost nothing.

    In a multi-process job every process has the hook and makes the same calls; check `run.is_main`
    before writing or printing. Requests to the run (`stop`, `save`, `evaluate`) are carried out
    after the current step.

    A hook that raises a `ReplicaxError` ends the run with it. A hook that raises any other error is
    reported and disabled, and the run continues.

    Examples:
        >>> class Print(rx.Hook):
        ...     def record(self, run, record):
        ...         print(record.kind, record.step, record.metrics)
        >>> rx.fit(dp, state, source, batch_size=32, epochs=1, hooks=[Print()])
    """

    @property
    def name(self) -> str:
        """A unique name, used in messages, timings, and checkpoints."""
        return type(self).__name__

    @property
    def pinned(self) -> Collection[int]:
        """Steps whose checkpoints are never deleted."""
        return ()

    @property
    def wrap(self) -> Callable[[Apply], Apply] | None:
        """A function that wraps the optimizer's part of the step, to add metrics; or None."""
        return None

    @property
    def interval(self) -> int | None:
        """Steps between those after which `run.state` must be at hand; None for no such step.

        A call of several steps ends at each of its multiples; `before_step` and `dispatched` are
        called once for each call. By default 1 for a hook that has either, so that each step is a
        call of its own.
        """
        looks = ("before_step", "dispatched")
        return 1 if any(_overrides(self, point) for point in looks) else None

    def before_run(self, run: RunT) -> None:
        """Called before anything is written, read or compiled: refuse here what cannot work."""

    def start(self, run: RunT) -> None:
        """Called before the first step of a new or resumed run."""

    def before_step(self, run: RunT, batch: Any) -> None:
        """Called before the step on a `Batch`, which may donate `run.state`.

        In a run whose calls have several steps, before such a call, on its `Batches`.
        """

    def dispatched(self, run: RunT, step: Dispatched) -> None:
        """Called after a step was dispatched to the devices; `run.state` is its result."""

    def step(self, run: RunT, step: Dispatched) -> None:
        """Called when the next step has finished, some steps after it was dispatched.

        Reading its `metrics` does not block.
        """

    def settle(self, run: RunT, due: bool) -> None:
        """Called after all hooks have seen the finished steps.

        Args:
            run: the run.
            due: whether `run.state` is about to be saved or evaluated, or the run to end.
        """

    def figures(self, run: RunT, record: Record) -> dict[str, float]:
        """Return additional `figures` for `record`, which is of kind `train`."""
        return {}

    def record(self, run: RunT, record: Record) -> None:
        """Called for every new record: `train`, `eval`, `skip`, `noise`, or a hook's kind."""

    def evaluation(self, run: RunT, record: Record) -> None:
        """Called after an evaluation, once its record was added."""

    def epoch(self, run: RunT, record: Record | None) -> None:
        """Called at the end of an epoch or of the run, with the evaluation's record, if any."""

    def saving(self, run: RunT) -> None:
        """Called before a checkpoint is saved."""

    def rewound(self, run: RunT) -> None:
        """Called after the run went back to an earlier step; the steps after it are discarded."""

    def take_over(self, run: RunT) -> None:
        """Called when this process becomes the one that writes and prints.

        The island that did is gone; `run.is_main` is true from now on.
        """

    def save_state(self) -> Any:
        """Return the hook's state for checkpoints, JSON-serializable; None for no state."""
        return None

    def load_state(self, state: Any) -> None:
        """Restore a state that `save_state` returned; called before `start`."""

    def summary(self) -> list[str]:
        """Return lines to print at the end of the run."""
        return []

    def end(self, run: RunT) -> None:
        """Called when the run is done, stopped, or failed with `run.error`; close files here."""


def _overrides(hook: Hook, point: str) -> bool:
    return getattr(type(hook), point) is not getattr(Hook, point)


_POINTS = [name for name, each in vars(Hook).items() if inspect.isfunction(each)]
"""The methods that a hook may override."""


class Hooks:
    """The hooks of a run, called in order and timed; a hook that fails is disabled."""

    def __init__(
        self,
        hooks: Sequence[Hook],
        run: Running,
        alarm: Callable[[str], None],
        uncounted: Sequence[Hook],
    ) -> None:
        self.seconds: dict[str, float] = {}
        """Hook name -> seconds that the loop spent in it, without the `uncounted` of every run."""
        self.failed: list[str] = []
        for hook in hooks:
            if hook.name in self.seconds:
                raise ConfigError(
                    f"two hooks are named {hook.name}; checkpoints identify hooks by name: give "
                    "one of them another `name`"
                )
            self.seconds[hook.name] = 0.0
        for hook in uncounted:
            del self.seconds[hook.name]
        self._hooks, self._run, self._alarm = list(hooks), run, alarm
        self._at = {point: [each for each in hooks if _overrides(each, point)] for point in _POINTS}

    def __call__(self, point: str, *arguments: Any) -> None:
        for hook in tuple(self._at[point]):  # a copy: one that fails is taken out meanwhile
            self._call(hook, point, self._run.place.step, self._run, *arguments)

    def has(self, point: str) -> bool:
        """Whether a hook overrides `point`."""
        return bool(self._at[point])

    def figures(self, record: Record) -> dict[str, float]:
        results = self._all("figures", record.step, self._run, record).values()
        return {name: value for each in results for name, value in (each or {}).items()}

    def summary(self, step: int) -> list[str]:
        """Return the closing lines of all hooks; the run ended after `step`."""
        return [line for lines in self._all("summary", step).values() for line in lines or ()]

    @property
    def wraps(self) -> tuple[Callable[[Apply], Apply], ...]:
        return tuple(hook.wrap for hook in self._hooks if hook.wrap is not None)

    @property
    def intervals(self) -> dict[str, int]:
        """The `interval` of each hook that has one, by the hook's name."""
        intervals = {hook.name: hook.interval for hook in self._hooks}
        return {name: steps for name, steps in intervals.items() if steps is not None}

    @property
    def pinned(self) -> set[int]:
        return {step for hook in self._hooks for step in hook.pinned}

    def save_state(self, step: int) -> dict[str, Any]:
        """Return the states of all hooks for a checkpoint of `step`."""
        states = self._all("save_state", step)
        return {name: state for name, state in states.items() if state is not None}

    def load_state(self, step: int, states: dict[str, Any]) -> None:
        """Restore the states that `save_state` returned at `step`; new hooks start fresh."""
        for hook in tuple(self._at["load_state"]):
            if hook.name in states:
                self._call(hook, "load_state", step, states[hook.name])

    def _all(self, point: str, step: int, *arguments: Any) -> dict[str, Any]:
        """Call the hooks that override `point`; return their results by name."""
        return {each.name: self._call(each, point, step, *arguments) for each in [*self._at[point]]}

    def _call(self, hook: Hook, point: str, step: int, *arguments: Any) -> Any:
        started = time.perf_counter()
        try:
            result = getattr(hook, point)(*arguments)
            if point == "save_state":
                json.dumps(result, allow_nan=False)  # checkpoints store it as JSON
            return as_floats(result or {}) if point == "figures" else result
        except ReplicaxError:
            raise
        except Exception as error:  # a broken hook must not end the run
            self._leave_out(hook, point, step, error)
            return None
        finally:
            if hook.name in self.seconds:
                self.seconds[hook.name] += time.perf_counter() - started

    def _leave_out(self, hook: Hook, point: str, step: int, error: Exception) -> None:
        self.failed.append(hook.name)
        for hooks in self._at.values():
            if hook in hooks:
                hooks.remove(hook)
        where = traceback.extract_tb(error.__traceback__)[-1]
        self._alarm(
            f"hook {hook.name} failed in {point} at step {step:,} "
            f"({Path(where.filename).name}:{where.lineno}, {first_line(error)}); the run continues "
            "without it"
        )
