"""Arrays of a checkpoint that Orbax wrote, by a run or elsewhere."""

import re
from pathlib import Path

import jax
import numpy as np

from replicax.core.ground.leaves import PyTree
from replicax.core.models.definition import is_trainable
from replicax.errors import CheckpointError, ConfigError, require
from replicax.train.checkpoints.with_orbax import quiet_orbax

_STEP = re.compile(r"(?:.+_)?(\d+)")
_TREE = "_METADATA"
_OF_A_STATE = {"params", "opt_state"}


def read_orbax(folder: Path) -> dict[str, np.ndarray]:
    """Return the arrays of a checkpoint of Orbax by their paths, such as `dense.kernel`.

    Of a train state, a tree with `params` and `opt_state`, the parameters alone, by their paths in
    `params`, and of a run also those in `extras`, such as BatchNorm's statistics. Any checkpointer
    of Orbax may have written it, on any devices.

    Args:
        folder: of a run, of a `CheckpointManager`, whose newest step is read, of a step, or of an
            item of a step.

    Raises:
        ConfigError: no such folder, or a step with several items.
        CheckpointError: it cannot be read.

    Examples:
        >>> _ = rx.fit(dp, state, source, batch_size=32, epochs=1, run_dir="runs/x")
        >>> read_orbax(Path("runs/x"))["w"].shape
        (3,)
    """
    weights, others = read_parts(folder)
    return weights | others


def read_parts(folder: Path) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Return what `read_orbax` does: weights, and a run's other arrays, such as counters."""
    orbax = require("orbax.checkpoint", "checkpoints")
    item = _item(folder.absolute())
    try:
        with quiet_orbax(), orbax.PyTreeCheckpointer() as reader:
            names = reader.metadata(item).item_metadata.tree
            as_numpy = jax.tree.map(lambda _: orbax.RestoreArgs(restore_type=np.ndarray), names)
            tree = reader.restore(item, restore_args=as_numpy)
    except Exception as error:  # Orbax raises many types
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise CheckpointError(f"{item} cannot be read: {lines[0]}") from error
    if not (isinstance(tree, dict) and tree.keys() >= _OF_A_STATE):
        return _by_path(tree), {}
    extras = _by_path(tree.get("extras"))
    statistics = {name: array for name, array in extras.items() if is_trainable(array)}
    others = {name: array for name, array in extras.items() if name not in statistics}
    return _by_path(tree["params"]) | statistics, others


def _by_path(tree: PyTree) -> dict[str, np.ndarray]:
    return {
        ".".join(jax.tree_util.keystr((key,), simple=True) for key in path): np.asarray(leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def _item(folder: Path) -> Path:
    """Return the folder of the tree of arrays in `folder`."""
    if (folder / _TREE).is_file():
        return folder
    if not folder.is_dir():
        raise ConfigError(f"{folder} is not a folder; pass one that Orbax wrote")
    inside = {path.name: path for path in folder.iterdir() if path.is_dir()}
    if "checkpoints" in inside:
        return _item(inside["checkpoints"])
    items = sorted(name for name, path in inside.items() if (path / _TREE).is_file())
    if len(items) == 1:
        return inside[items[0]]
    if items:
        raise ConfigError(
            f"{folder} has {len(items)} trees of arrays, {', '.join(items)}: pass the folder of one"
        )
    steps = {
        int(match[1]): path for name, path in inside.items() if (match := _STEP.fullmatch(name))
    }
    if not steps:
        raise ConfigError(f"{folder} has no checkpoint of Orbax; pass a folder that Orbax wrote")
    return _item(steps[max(steps)])
