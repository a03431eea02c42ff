"""Open a run again, for the commands that need one."""

import dataclasses
import inspect
from pathlib import Path
from typing import Annotated, Any, ClassVar

import replicax as rx
from replicax.cli.flags import BY_PLACE, shown_as
from replicax.cli.output import RUNS
from replicax.cli.step_options import check_alone
from replicax.errors import ConfigError, did_you_mean
from replicax.recipes.recipe import recipe_name
from replicax.text.python_file import from_file
from replicax.train.files.places import place, shown
from replicax.train.folder.load import Checkpoint, Loaded, find_checkpoint


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunOptions:
    """The run, for commands that open one."""

    run: Annotated[str, BY_PLACE, shown_as("RUN")]
    """The run: its name in runs/, its folder, or its URL in an object store."""
    step: Annotated[str | None, shown_as("N|best", "the newest")] = None
    """The checkpoint to take: updates done, or best for the one that best.json names."""
    recipe: Annotated[str | None, shown_as("RECIPE", "the run's, if built in")] = None
    """The run's recipe, if it is your own: file.py:Name, or package.module:Name."""

    own: ClassVar[str]
    """The fix for a run that `replicax train` did not make."""

    def open(self, command: str) -> Loaded:
        """Return the run's checkpoint, loaded on the available devices."""
        checkpoint = self.checkpoint(command)
        if "recipe" not in checkpoint.manifest.config:
            raise ConfigError(
                f"{shown(checkpoint.run)} was not created by replicax train, so it does not record "
                f"its model: {self.own}"
            )
        return rx.load(self.folder(), step=checkpoint.manifest.position.step, recipe=self.recipe)

    def checkpoint(self, command: str) -> Checkpoint:
        """Return the run's checkpoint, of which no array was read."""
        check_alone(command, "it opens a run in one process: run it alone")
        step: int | str | None = self.step
        if self.step not in (None, "best"):
            number = str(self.step).replace(",", "")
            if not number.isdecimal():
                raise ConfigError(
                    f"--step {self.step}; it must be a number of steps, or best: leave it out for "
                    "the newest"
                )
            step = int(number)
        return find_checkpoint(self.folder(), step)

    def folder(self) -> Path:
        """Return the run's folder."""
        if "://" in self.run or not self.run:  # an empty name is refused there
            return place(self.run)
        for folder in (RUNS / self.run, Path(self.run)):
            if folder.is_dir():
                return folder
        names = [path.name for path in RUNS.iterdir()] if RUNS.is_dir() else []
        raise ConfigError(
            f"no run is named {self.run!r}: neither {RUNS / self.run} nor {self.run} is a "
            f"folder{did_you_mean(self.run, names)}; replicax runs lists those in runs/"
        )


def of_own_program(spec: str, wanted: str) -> Any:
    """Return the object `FILE.py:name`, or its result if it is a function."""
    found = from_file(spec, wanted, {})
    if isinstance(found, type):
        raise ConfigError(
            f"{spec} is a class; name a function without arguments that returns {wanted}"
        )
    return found() if inspect.isroutine(found) else found  # a model may be callable, too


def about_line(run: Path, step: int, recipe: Any = None) -> str:
    """Return `run    runs/first · lenet · step 400`."""
    named = "" if recipe is None else f" · {recipe_name(type(recipe))}"
    return f"run    {shown(run)}{named} · step {step:,}"
