"""`replicax export`: write a run's model as a .safetensors file."""

import dataclasses
import os
import tempfile
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np

from replicax.cli.flags import BY_PLACE, parse, shown_as
from replicax.cli.opened import RunOptions, about_line
from replicax.core.ground.leaves import PyTree
from replicax.errors import ConfigError, require
from replicax.train.load import Loaded
from replicax.train.places import check_replaceable
from replicax.wording import size_text


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExportOptions(RunOptions):
    """Writes the model of a run as a .safetensors file, which needs neither JAX nor Replicax.

    Parameters, and statistics such as BatchNorm's, are named by their dotted paths and keep the
    dtypes they are trained in. gpt2 uses the published names, in float32, so that transformers can
    read the file, and so can replicax train gpt2 --init-from.
    """

    file: Annotated[Path, BY_PLACE, shown_as("FILE")]
    """The file to write, such as model.safetensors."""
    force: bool = False
    """Overwrite the file."""


def export(arguments: list[str]) -> int:
    """Run the command; return its exit code."""
    options = parse("export", ExportOptions, arguments)
    file = options.file
    if file.is_dir():
        raise ConfigError(f"{file} is a folder; give a file, such as {file / 'model.safetensors'}")
    if not file.parent.is_dir():
        raise ConfigError(f"{file}: there is no folder {file.parent}; create it first")
    if os.path.lexists(file):
        if not options.force:
            raise ConfigError(f"{file} exists; choose another name, or overwrite it with --force")
        check_replaceable(file)
    numpy_format = require("safetensors.numpy", "text")
    loaded = options.open("export")
    tensors = _tensors(loaded)
    try:
        with tempfile.TemporaryDirectory(prefix=".export-", dir=file.parent) as folder:
            whole = Path(folder, file.name)
            numpy_format.save_file(tensors, whole, metadata={"format": "pt"})
            whole.replace(file)
    except (OSError, KeyError, require("safetensors", "text").SafetensorError) as error:
        raise ConfigError(f"{file} cannot be written ({error}); choose another") from error
    size = size_text(os.path.getsize(file))
    parameters = sum(array.size for array in tensors.values())
    print(about_line(loaded))
    print(f"wrote  {file}: {parameters:,} numbers in {len(tensors):,} tensors, {size}")
    return 0


def _tensors(loaded: Loaded) -> dict[str, np.ndarray]:
    recipe: Any = loaded.recipe
    if hasattr(recipe, "published_weights"):
        published: dict[str, np.ndarray] = recipe.published_weights(
            loaded.dp.model(loaded.state, copy=False)
        )
        return published
    params, extras = _named(loaded.state.params), _named(loaded.state.extras)
    # Besides statistics, a model may keep counters and random keys.
    statistics = {
        name: leaf for name, leaf in extras.items() if jnp.issubdtype(leaf.dtype, jnp.inexact)
    }
    if both := params.keys() & statistics.keys():
        raise ConfigError(
            f"{min(both)} is a parameter and a statistic of this model; names in a file must be "
            "unique: rename one in the model"
        )
    return {
        name: np.asarray(leaf, order="C")  # safetensors ignores strides
        for name, leaf in {**params, **statistics}.items()
    }


def _named(tree: PyTree) -> dict[str, jax.Array]:
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }
