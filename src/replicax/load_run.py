"""Load a run from its folder: the model, the state and the records."""

import shlex
from pathlib import Path
from typing import Any, Literal

import jax

from replicax.core.data_parallel import DataParallel
from replicax.core.ground.train_state import ModelT, TrainState
from replicax.errors import ConfigError
from replicax.recipes.recipe import BUILT_IN, abstract_model, find_recipe, recipe_of
from replicax.text.arguments import typed
from replicax.train.files.places import place
from replicax.train.folder.load import Checkpoint, Loaded, find_checkpoint, load_checkpoint
from replicax.train.folder.read_model import read_model


@typed
def load(
    run_dir: str | Path,
    *,
    dp: DataParallel | None = None,
    state: TrainState[ModelT] | None = None,
    step: int | Literal["best"] | None = None,
    recipe: str | None = None,
) -> Loaded[ModelT]:
    """Load a run's newest checkpoint, verified byte by byte, onto the devices of `dp`.

    It takes no lease and changes nothing, so the run may continue at the same time. Devices,
    processes, mode and layout may differ from the run's.

    Examples:
        >>> _ = rx.fit(dp, state, source, batch_size=32, epochs=1, run_dir="runs/mine")
        >>> run = rx.load("runs/mine", dp=dp)
        >>> weights, value = run.model, run.records[-1].metrics["loss"]

    Args:
        run_dir: the run's folder or the folder of one of its checkpoints, or the URL of either.
        dp: a `DataParallel` with the run's loss and optimizer. Optional for a run of
            `replicax train`: by default it uses the run's recipe, in mode `jit`, on all devices.
        state: a state, or its shapes, as from `dp.abstract_state(model)`. Optional if `dp` has
            a model, from `init` or by a step, and for a run of `replicax train`.
        recipe: the run's recipe, `"file.py:Name"` or `"package.module:Name"`, if it is not built
            in: code that only the run's folder names is never run.
        step: step of the checkpoint; `"best"` for the one named in `best.json`; the newest by
            default.

    Returns:
        The saved run. The losses of `Guard(skip_spikes=True)` and the state of a reduction are left
        out if `state` has none. Of a run with `rx.Rounds`, a `dp` without them, as by default,
        takes the outer parameters, and begins with a new optimizer state.

    Raises:
        ConfigError: no run, no such checkpoint, a different model or optimizer, or a recipe of
            your own without `recipe`.
        CheckpointError: the checkpoint fails verification; it is left in place.
        MissingDependencyError: Orbax is not installed.
    """
    checkpoint = find_checkpoint(place(run_dir), step)
    if state is not None and dp is None:
        raise ConfigError(
            "state= without dp=; a state belongs to a DataParallel: pass both, or for the model "
            "alone call rx.load_model(run_dir, model)"
        )
    if state is None and dp is not None and dp.knows_model and _recipe_of(checkpoint) is None:
        state = dp.abstract_state()
    if dp is not None and state is not None:
        return load_checkpoint(checkpoint, dp, state)
    restored = _recipe(checkpoint, recipe)
    if dp is None:
        parallel = checkpoint.manifest.config.get("parallel", {})
        settings = {name: parallel[name] for name in ("precision", "ema") if name in parallel}
        dp = DataParallel(restored.loss, restored.optimizer(), **settings)
    shapes = dp.abstract_state(abstract_model(restored.model, jax.random.key(0)))
    return load_checkpoint(checkpoint, dp, shapes, restored)


@typed
def load_model(
    run_dir: str | Path,
    model: ModelT | None = None,
    *,
    ema: bool = False,
    step: int | Literal["best"] | None = None,
    recipe: str | None = None,
) -> ModelT:
    """Return a run's trained model in inference mode, without its optimizer, loss and data.

    Parameters and statistics, such as BatchNorm's, are verified byte by byte. The run may continue
    at the same time, and its devices, layout, mode and optimizer do not matter.

    Examples:
        >>> _ = rx.fit(dp, state, source, batch_size=32, epochs=1, run_dir="runs/predicts")
        >>> trained = rx.load_model("runs/predicts", model)
        >>> trained["w"].shape
        (3,)

    Args:
        run_dir: the run's folder or the folder of one of its checkpoints, or the URL of either.
        model: a model as it was given to `dp.init`, with any numbers, or its shapes; its arrays are
            read to where these were put, by default to the first device. Of a run with a custom
            step, a dict of the parts of its state that are wanted. Optional for a run of
            `replicax train`.
        ema: whether to take the moving average of the parameters, as for `dp.evaluate`.
        step: as for `rx.load`.
        recipe: as for `rx.load`.

    Returns:
        A model like the given one, which is unchanged: NNX as after `model.eval()`, Equinox as by
        `eqx.nn.inference_mode`. Linen and plain pytrees have no mode: a call's arguments say it.
        `dp.init` takes it to train further.

    Raises:
        ConfigError: no run, no such checkpoint, a different model, or no average.
        CheckpointError: the checkpoint fails verification; it is left in place.
        MissingDependencyError: Orbax is not installed.
    """
    checkpoint = find_checkpoint(place(run_dir), step)
    if model is None:
        if _recipe_of(checkpoint) is None:
            raise ConfigError(
                f"{checkpoint.run} was not created by replicax train, so it does not record its "
                "model: call rx.load_model(run_dir, model)"
            )
        model = abstract_model(_recipe(checkpoint, recipe).model, jax.random.key(0))
    trained: ModelT = read_model(checkpoint, model, ema=ema)
    return trained


def _recipe_of(checkpoint: Checkpoint) -> Any:
    return checkpoint.manifest.config.get("recipe")


def _recipe(checkpoint: Checkpoint, named: str | None) -> Any:
    """Return the recipe of a run of `replicax train`; one that is not built in must be `named`."""
    config, run = checkpoint.manifest.config, checkpoint.run
    spec, fields = _recipe_of(checkpoint), config.get("fields")
    if not isinstance(spec, str) or not isinstance(fields, dict):
        raise ConfigError(
            f"{run} was not created by replicax train, so it does not record its loss and model: "
            "call rx.load_model(run_dir, model) for the model alone, or rx.load(run_dir, dp=dp, "
            "state=dp.abstract_state(model))"
        )
    if named is None and spec not in {
        *BUILT_IN,
        *BUILT_IN.values(),
    }:  # whoever made the folder chose this text
        raise ConfigError(
            f"{run} asks for the recipe {spec!r}, which is not built in; code that a run's folder "
            f"names is not run unless you name it too: --recipe {shlex.quote(spec)}, or recipe= of "
            "rx.load"
        )
    return recipe_of(find_recipe(named or spec), fields)
