"""`replicax export`: write a run's model as a .safetensors file."""

import dataclasses
import os
from pathlib import Path
from typing import Annotated

from replicax.cli.flags import BY_PLACE, parse, shown_as
from replicax.cli.opened import RunOptions, about_line, of_own_program
from replicax.cli.output import show
from replicax.errors import ConfigError, require
from replicax.recipes.recipe import weight_names
from replicax.text.wording import size_text
from replicax.train.files.places import check_replaceable
from replicax.train.folder.read_model import read_model
from replicax.weights.save_weights import check_suffix, save_weights


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExportOptions(RunOptions):
    """Writes the model of a run as a .safetensors file, which needs neither JAX nor Replicax.

    Parameters, and statistics such as BatchNorm's, are named by their dotted paths and keep the
    dtypes they are trained in. gpt2 uses the published names, so that transformers can read the
    file. replicax train RECIPE --init-from begins with it.
    """

    file: Annotated[Path, BY_PLACE, shown_as("FILE")]
    """The file to write, such as model.safetensors."""
    model: Annotated[str | None, shown_as("FILE.py:name", "the recipe's")] = None
    """For a run of your own program: a function that returns its model; the file is run."""
    force: bool = False
    """Overwrite the file, if it is a .safetensors file."""

    own = "name a function of your program that returns it, --model FILE.py:name"


def export(arguments: list[str]) -> int:
    """Run the command; return its exit code."""
    options = parse("export", ExportOptions, arguments)
    file = options.file
    if file.is_dir():
        raise ConfigError(f"{file} is a folder; give a file, such as {file / 'model.safetensors'}")
    check_suffix(file)
    if not file.parent.is_dir():
        raise ConfigError(f"{file}: there is no folder {file.parent}; create it first")
    if os.path.lexists(file):
        if not options.force:
            raise ConfigError(f"{file} exists; choose another name, or overwrite it with --force")
        check_replaceable(file)
        with file.open("rb") as before:
            begun = before.read(9)  # the length of a header in JSON, and its beginning
        if begun and begun[8:] != b"{":
            raise ConfigError(f"{file} is no .safetensors file, which --force overwrites; name one")
    require("safetensors.numpy", "text")  # before the run is loaded
    if options.model is None:
        loaded = options.open("export")
        model = loaded.dp.model(loaded.state, copy=False)
        names = weight_names(loaded.recipe)
        about = about_line(loaded.path.parent.parent, loaded.step, loaded.recipe)
    else:
        checkpoint = options.checkpoint("export")
        made = of_own_program(options.model, "a model")
        model, names = read_model(checkpoint, made, ema=False), {}
        about = about_line(checkpoint.run, checkpoint.manifest.position.step)
    tensors = save_weights(model, file, rename=names)
    size = size_text(os.path.getsize(file))
    parameters = sum(array.size for array in tensors.values())
    wrote = f"{parameters:,} numbers in {len(tensors):,} tensors, {size}"
    show(about, f"wrote  {file}: {wrote}")
    return 0
