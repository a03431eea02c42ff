"""`replicax export`: write a run's model as a .safetensors file, or its prediction as a program."""

import dataclasses
import os
from pathlib import Path
from typing import Annotated

import jax
import jax.export

from replicax.cli.flags import BY_PLACE, parse, shown_as
from replicax.cli.opened import RunOptions, about_line, of_own_program
from replicax.cli.output import show
from replicax.core.ground.leaves import kind
from replicax.core.ground.traced_for import traced_for
from replicax.errors import ConfigError, require
from replicax.recipes.recipe import recipe_name, weight_names
from replicax.text.wording import size_text
from replicax.train.files.places import check_replaceable, write_whole
from replicax.train.folder.read_model import read_model
from replicax.weights.save_weights import check_suffix, save_weights

STABLEHLO = ".stablehlo"
LARGEST_FILE = 1 << 31
"""The limit of a flatbuffer, which the file is."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExportOptions(RunOptions):
    """Writes the model of a run as a .safetensors file, which needs neither JAX nor Replicax.

    Parameters, and statistics such as BatchNorm's, are named by their dotted paths and keep the
    dtypes they are trained in. gpt2 uses the published names, so that transformers can read the
    file. replicax train RECIPE --init-from begins with it.

    FILE.stablehlo gets the prediction with its weights, for any number of rows on CPUs, NVIDIA GPUs
    and TPUs; jax.export.deserialize reads it, without Replicax and the model's code.
    """

    file: Annotated[Path, BY_PLACE, shown_as("FILE")]
    """The file to write, such as model.safetensors or predict.stablehlo."""
    model: Annotated[str | None, shown_as("FILE.py:name", "the recipe's")] = None
    """For a run of your own program: a function that returns its model; the file is run."""
    force: bool = False
    """Overwrite the file, if it is one of the same kind."""

    own = "name a function of your program that returns it, --model FILE.py:name"


def export(arguments: list[str]) -> int:
    """Run the command; return its exit code."""
    options = parse("export", ExportOptions, arguments)
    file = options.file
    if file.is_dir():
        raise ConfigError(f"{file} is a folder; give a file, such as {file / 'model.safetensors'}")
    as_program = file.suffix == STABLEHLO
    if not as_program:
        check_suffix(file)
    if not file.parent.is_dir():
        raise ConfigError(f"{file}: there is no folder {file.parent}; create it first")
    if os.path.lexists(file):
        if not options.force:
            raise ConfigError(f"{file} exists; choose another name, or overwrite it with --force")
        check_replaceable(file)
        if not _is_overwritten(file, file.read_bytes()):
            raise ConfigError(
                f"{file} is no {file.suffix} file, which --force overwrites; name one"
            )
    show(*(_program if as_program else _weights)(options, file))
    return 0


def _is_overwritten(file: Path, before: bytes) -> bool:
    """Return whether a file is empty, or of the kind that its suffix says."""
    if before and file.suffix == STABLEHLO:
        try:
            jax.export.deserialize(bytearray(before))
        except Exception:  # of flatbuffers, which checks nothing
            return False
        return True
    return not before or before[8:9] == b"{"  # after the length of a header in JSON


def _weights(options: ExportOptions, file: Path) -> tuple[str, str]:
    """Write the model's weights; return what is shown."""
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
    return about, f"wrote  {file}: {parameters:,} numbers in {len(tensors):,} tensors, {size}"


def _program(options: ExportOptions, file: Path) -> tuple[str, str]:
    """Write the prediction of the model; return what is shown."""
    yours = "jax.export writes those of other programs: docs/checkpoints.md shows the lines"
    if options.model is not None:
        raise ConfigError(f"--model with {file.name}; a model does not name its inputs: {yours}")
    loaded = options.open("export")
    if not hasattr(loaded.recipe, "prediction"):
        raise ConfigError(
            f"recipe {recipe_name(type(loaded.recipe))} has no method prediction, which names the "
            f"inputs of its model: add it, or {yours}"
        )
    function, row = loaded.recipe.prediction()
    size = sum(leaf.nbytes for leaf in jax.tree.leaves((loaded.state.params, loaded.state.extras)))
    if size >= LARGEST_FILE:
        raise ConfigError(
            f"{size_text(size)} of weights, and a {STABLEHLO} file holds less than "
            f"{size_text(LARGEST_FILE)}: write a .safetensors file"
        )
    model = loaded.dp.model(loaded.state, copy=False)
    shape = jax.ShapeDtypeStruct((*jax.export.symbolic_shape("rows"), *row.shape), row.dtype)
    with traced_for(None):  # kernels of this machine's GPU are no part of it
        predict = jax.jit(lambda rows: function(model, rows))
        exported = jax.export.export(predict, platforms=("cpu", "cuda", "tpu"))(shape)
    write_whole(file, bytes(exported.serialize()))
    about = about_line(loaded.path.parent.parent, loaded.step, loaded.recipe)
    takes, gives = (", ".join(map(kind, each)) for each in (exported.in_avals, exported.out_avals))
    size = size_text(os.path.getsize(file))
    return about, f"wrote  {file}: {takes} -> {gives}, {size}"
