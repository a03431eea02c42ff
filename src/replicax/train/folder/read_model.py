"""Read the model alone from a checkpoint, without the optimizer and the loss of its run."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Sharding

from replicax.core.data.per_row import real_rows
from replicax.core.models.pytree import CustomState, split_pytree
from replicax.core.models.split import split_model
from replicax.core.models.training_mode import for_inference
from replicax.errors import ConfigError, require
from replicax.text.wording import named
from replicax.train.checkpoints.arrays import array_entries, named_leaves, read_named
from replicax.train.checkpoints.manifest import ArrayEntry
from replicax.train.checkpoints.store import array_differences
from replicax.train.folder.load import Checkpoint, trusted

_AVERAGES = ("opt_state.average.", "opt_state.inner_states.trained.inner_state.average.")
"""Where `DataParallel(ema=)` keeps its average: of all parameters, or of those that train."""


def read_model(checkpoint: Checkpoint, model: Any, *, ema: bool) -> Any:
    """Return `model` with the arrays of a verified checkpoint, in inference mode."""
    require("orbax.checkpoint", "checkpoints")
    path, arrays = checkpoint.path, checkpoint.manifest.arrays
    custom = "step" in checkpoint.manifest.config.get("parallel", {})
    definition, params, extras = split_pytree(model, CustomState) if custom else split_model(model)
    trees = real_rows({"params": params, "extras": {} if custom else extras})
    wanted = array_entries(trees)
    # Of the state of a custom step a part is enough.
    ours = wanted.keys() if custom else {n for n in arrays if n.startswith(("params.", "extras."))}
    saved = {name: entry for name, entry in arrays.items() if name in ours}
    if faults := list(array_differences(saved, wanted, "the model")):
        fix = "a dict of parts of the step's state" if custom else "the model that it trains"
        raise ConfigError(f"{path} does not fit this model: {named(faults, 3)}; pass {fix}")
    averages = _averages(checkpoint, wanted) if ema else {}
    leaves = named_leaves(trees)
    default = jnp.zeros(()).sharding
    like = {averages.get(name, name): _placed(leaf, default) for name, leaf in leaves.items()}
    like |= {name: like[name].update(dtype=arrays[name].dtype) for name in averages.values()}
    with trusted(path, checkpoint.identity, checkpoint.others):
        checkpoint.store.verify(path, checkpoint.manifest)
        read = read_named(like, checkpoint.store.local(path))
    found = [
        read[averages[name]].astype(leaf.dtype) if name in averages else read[name]
        for name, leaf in leaves.items()
    ]
    filled = jax.tree.unflatten(jax.tree.structure(trees), found)
    merged = definition.merge(filled["params"], filled["extras"])
    return for_inference(merged) if custom else definition.in_inference(merged)


def _averages(checkpoint: Checkpoint, wanted: Mapping[str, ArrayEntry]) -> dict[str, str]:
    """Return the name of the average of each parameter that has one."""
    arrays = checkpoint.manifest.arrays
    found = {
        name: average
        for name in wanted
        for start in _AVERAGES
        if (average := start + name.removeprefix("params.")) in arrays
    }
    if not found or "ema" not in checkpoint.manifest.config.get("parallel", {}):
        raise ConfigError(
            f"ema=True, but {checkpoint.run} keeps no average of its parameters; leave it out, or "
            "train with DataParallel(loss, optimizer, ema=0.999)"
        )
    return found


def _placed(leaf: Any, default: Sharding) -> jax.ShapeDtypeStruct:
    """Return the shape of a leaf, and where it was put on purpose, or the default device."""
    chosen = getattr(leaf, "sharding", None) if getattr(leaf, "committed", True) else None
    shape = jax.eval_shape(lambda leaf: leaf, leaf)
    return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=chosen or default)
