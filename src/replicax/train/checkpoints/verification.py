"""Whether a checkpoint is what its manifest says, and of this run, before any of it is used.

Orbax and tensorstore believe what they find: a chunk that is missing is read as zeros, a flipped
bit as it is. Who can write into a run's folder is trusted as the code is; its disk is not.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path

from replicax.errors import CheckpointError
from replicax.train.checkpoints.checksum import first_difference
from replicax.train.checkpoints.manifest import ArrayEntry, Manifest

STATE = "state"
"""The folder of the arrays, in a checkpoint's."""

_MOST_NAMED = 3


def verify(folder: Path, manifest: Manifest) -> None:
    """Check the checkpoint in `folder`: names and sizes first, then every byte.

    Args:
        folder: `manifest.json`, and the arrays in `state/`.
        manifest: from `read_manifest`.

    Raises:
        CheckpointError: it is not as it was written, or was not written whole.
    """
    if reason := first_difference(folder, manifest.files):
        raise CheckpointError(reason)
    chunks = dict.fromkeys(manifest.arrays, 0)
    for path, file in manifest.files.items():
        array, _, chunk = path.removeprefix(f"{STATE}/").rpartition("/")
        if array in chunks and chunk != ".zarray":
            chunks[array] += file.bytes
    for name, entry in manifest.arrays.items():
        if chunks[name] < entry.nbytes:
            raise CheckpointError(
                f"{name} has {chunks[name]} bytes, and {entry} takes {entry.nbytes}"
            )


def check_arrays(arrays: Mapping[str, ArrayEntry], wanted: Mapping[str, ArrayEntry]) -> None:
    """Raise `CheckpointError` where a checkpoint's arrays are not those of the run.

    Args:
        arrays: of its manifest.
        wanted: of the run that is to go on from it.
    """
    differences = list(_differences(arrays, wanted))
    if not differences:
        return
    more = len(differences) - _MOST_NAMED
    named = "; ".join(differences[:_MOST_NAMED]) + (f"; and {more} more" if more > 0 else "")
    fix = "the model, the optimizer or the precision is another; go back to theirs"
    if all(each.startswith("reduction") for each in differences):
        fix = "each replica has its own; go back to as many devices, and to this reduction"
    raise CheckpointError(f"{named}: {fix}, or start a new run")


def _differences(
    arrays: Mapping[str, ArrayEntry], wanted: Mapping[str, ArrayEntry]
) -> Iterator[str]:
    for name in sorted(arrays.keys() | wanted.keys()):
        if name not in wanted:
            yield f"{name} is in it and not in this run"
        elif name not in arrays:
            yield f"{name} is in this run and not in it"
        elif arrays[name] != wanted[name]:
            yield f"{name} is {arrays[name]} in it and {wanted[name]} in this run"
