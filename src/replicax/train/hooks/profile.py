"""`Profile`: what JAX's profiler sees of some steps."""

import re
from pathlib import Path
from typing import Self

import jax

from replicax.core.batch import Batch
from replicax.errors import ConfigError
from replicax.train.dispatched import Dispatched
from replicax.train.hook import Hook, Running
from replicax.train.places import on_disk

FOLDER = "profile"


class Profile(Hook):
    """Records the steps `first` to `last` with JAX's profiler, in process 0.

    TensorBoard with the plugin `tensorboard-plugin-profile`, and XProf, open what it writes. Where
    a start of the run begins between the two, it records the rest of them.

    Examples:
        >>> rx.fit(dp, state, source, batch_size=32, steps=1000, run_dir="runs/x",
        ...        hooks=[rx.Profile(100, 110)])

    Args:
        first: step, counted from 1, which compiles.
        last: step, recorded too.
        folder: `profile` in the run's folder by default.

    Raises:
        ConfigError: no steps; in a run, no folder.
    """

    def __init__(self, first: int, last: int, folder: str | Path | None = None) -> None:
        if not 1 <= first <= last:
            raise ConfigError(
                f"a profile of the steps {first} to {last}; the first is at least 1, and the last "
                "is not before it: correct them"
            )
        self._first, self._last = first, last
        self._folder = folder
        self._into: str | None = None
        self._began: int | None = None  # the first step that is being recorded, while it is
        self._done = False

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the profile of `100:110`, or of `100` alone.

        Raises:
            ConfigError: the text is neither.
        """
        found = re.fullmatch(r"(\d{1,18})(?::(\d{1,18}))?", text)
        if found is None:
            raise ConfigError(
                f"a profile of the steps {text!r}; they are a first and a last one: 100:110, say"
            )
        return cls(int(found[1]), int(found[2] or found[1]))

    def start(self, run: Running) -> None:
        if not run.is_main:
            return
        name = f"Profile({self._first}, {self._last})"
        folder = on_disk(run.folder, self._folder, FOLDER, name)
        folder.mkdir(parents=True, exist_ok=True)  # JAX says so only once all is recorded
        self._into, self._done = str(folder), False

    def before_step(self, run: Running, batch: Batch) -> None:
        step = run.place.step + 1
        if self._into is None or self._done or self._began is not None:
            return
        if self._first <= step <= self._last:
            jax.block_until_ready(run.state)  # what came before is not part of it
            jax.profiler.start_trace(self._into)
            self._began = step

    def dispatched(self, run: Running, step: Dispatched) -> None:
        if self._began is not None and step.place.step >= self._last:
            self._stop(run)

    def end(self, run: Running) -> None:
        if self._began is not None:
            self._stop(run)
        elif self._into is not None and run.place.step < self._first:
            run.say(f"profile none: the run ended at step {run.place.step:,}")

    def _stop(self, run: Running) -> None:
        began, self._began, self._done = self._began, None, True
        try:
            if run.error is None:
                jax.block_until_ready(run.state)
        finally:
            jax.profiler.stop_trace()
        run.say(f"profile {self._into}: steps {began:,} to {run.place.step:,}")
