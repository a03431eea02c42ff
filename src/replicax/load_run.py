"""A way back from a run: its folder -> the model, the state, the records."""

from pathlib import Path
from typing import Any

import jax

from replicax.core.data_parallel import DataParallel
from replicax.core.update import TrainState
from replicax.errors import ConfigError
from replicax.recipes.recipe import abstract_model, find_recipe, recipe_of
from replicax.train.load import Checkpoint, Loaded, find_checkpoint, load_checkpoint
from replicax.train.places import place


def load(
    run_dir: str | Path,
    *,
    dp: DataParallel | None = None,
    state: TrainState | None = None,
    step: int | str | None = None,
) -> Loaded:
    """Open a run again: its newest checkpoint, verified to the byte, on the devices of `dp`.

    It takes no lease and changes nothing, so the run may go on at the same time. The devices,
    processes, mode and layout may be others than the run's.

    Examples:
        >>> _ = rx.fit(dp, state, source, batch_size=32, epochs=1, run_dir="runs/mine")
        >>> run = rx.load("runs/mine", dp=dp, state=dp.abstract_state(model))
        >>> weights, value = run.model, run.records[-1].metrics["loss"]

    Args:
        run_dir: the run's folder, or its URL in an object store.
        dp: of the run's loss and optimizer. A run of `replicax train` needs none: by default it is
            of its recipe, in mode `jit`, on all devices.
        state: a state of `dp`, or its shapes. A run of `replicax train` needs none.
        step: updates done at the checkpoint; `"best"` for that of `best.json`; the newest by
            default.

    Returns:
        What was saved. The losses of `Guard(spikes=True)` and the state of a reduction are left out
        where `state` has none.

    Raises:
        ConfigError: no run, no such checkpoint, or one of another model or optimizer.
        CheckpointError: the checkpoint is not what was saved; it stays where it is.
        MissingDependencyError: Orbax is not installed.
    """
    checkpoint = find_checkpoint(place(run_dir), step)
    if state is not None and dp is None:
        raise ConfigError("state= without dp=; the state is one of a DataParallel: give both")
    if dp is not None and state is not None:
        return load_checkpoint(checkpoint, dp, state)
    recipe = _recipe(checkpoint)
    if dp is None:
        told = checkpoint.manifest.config.get("parallel", {})
        settings = {name: told[name] for name in ("precision", "ema") if name in told}
        dp = DataParallel(recipe.loss, recipe.optimizer(), **settings)
    shapes = dp.abstract_state(abstract_model(recipe.model, jax.random.key(0)))
    return load_checkpoint(checkpoint, dp, shapes, recipe)


def _recipe(checkpoint: Checkpoint) -> Any:
    """The recipe of a run that `replicax train` made."""
    config, run = checkpoint.manifest.config, checkpoint.run
    spec, fields = config.get("recipe"), config.get("fields")
    if not isinstance(spec, str) or not isinstance(fields, dict):
        raise ConfigError(
            f"{run} was not made by replicax train, so it does not know its loss and its model: "
            "give rx.load(run_dir, dp=dp, state=dp.abstract_state(model))"
        )
    # Who hands on a run must not thereby run a program here: the recipe is this machine's own.
    if Path(spec.partition(":")[0]).resolve().is_relative_to(run.resolve()):
        raise ConfigError(
            f"the recipe {spec} lies in the run's own folder, which is data; move it elsewhere, or "
            "give rx.load dp= and state="
        )
    return recipe_of(find_recipe(spec), fields)
