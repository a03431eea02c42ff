"""`Profile`: profile a range of steps with JAX's profiler."""

import re
from pathlib import Path
from typing import Self

import jax

from replicax.core.data.batch import Batch
from replicax.errors import ConfigError
from replicax.text.arguments import Count, typed
from replicax.train.dispatched import Dispatched
from replicax.train.files.places import on_disk
from replicax.train.hooks.hook import Hook, Running

_FOLDER = "profile"


class Profile(Hook):
    """Profiles steps `first` to `last` with JAX's profiler, in process 0.

    View the result in XProf, or in TensorBoard with the plugin `tensorboard-plugin-profile`. A run
    that resumes between the two steps profiles the remaining ones.

    Examples:
        >>> rx.fit(dp, state, source, batch_size=32, steps=1000, run_dir="runs/x",
        ...        hooks=[rx.hooks.Profile(100, 110)])

    Args:
        first: first profiled step. Steps are counted from 1; step 1 includes compilation.
        last: last profiled step, inclusive.
        folder: `profile` in the run's folder by default.

    Raises:
        ConfigError: no steps; in a run, no folder.
    """

    @typed
    def __init__(self, first: Count, last: Count, folder: str | Path | None = None) -> None:
        if first > last:
            raise ConfigError(
                f"a profile of steps {first} to {last}; the last must be at least the first: "
                "correct them"
            )
        self._first, self._last = first, last
        self._folder = folder
        self._into: str | None = None
        self._began: int | None = None  # the first profiled step, while profiling
        self._done = False

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the profile for `100:110`, or for the single step `100`.

        Raises:
            ConfigError: the text has neither form.
        """
        match = re.fullmatch(r"(\d{1,18})(?::(\d{1,18}))?", text)
        if match is None:
            raise ConfigError(
                f"a profile of steps {text!r}; give the first and last step, such as 100:110"
            )
        return cls(int(match[1]), int(match[2] or match[1]))

    def start(self, run: Running) -> None:
        if not run.is_main:
            return
        name = f"Profile({self._first}, {self._last})"
        folder = on_disk(run.folder, self._folder, _FOLDER, name)
        folder.mkdir(parents=True, exist_ok=True)  # JAX would fail only at the end of the profile
        self._into, self._done = str(folder), False

    def before_step(self, run: Running, batch: Batch) -> None:
        step = run.place.step + 1
        if self._into is None or self._done or self._began is not None:
            return
        if self._first <= step <= self._last:
            jax.block_until_ready(run.state)  # exclude earlier steps
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
