"""Whether a checkpoint is what its manifest says, before any of it is used.

Orbax and tensorstore believe what they find: a chunk that is missing is read as zeros, a flipped
bit as it is, and a `.zarray` may name a compressor. So the files are held against the one form in
which `replicax.train.checkpoints.arrays` writes: zarr version 2 (zarr-specs.readthedocs.io),
uncompressed, with every chunk there.
"""

import itertools
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from replicax.errors import CheckpointError
from replicax.train.checkpoints.checksum import first_difference, first_difference_in_size
from replicax.train.checkpoints.confined import open_folder, read
from replicax.train.checkpoints.manifest import ArrayEntry, Manifest, dtypes
from replicax.train.checkpoints.strict_json import canonical, parse, shown

STATE = "state"
"""The folder of the arrays, in a checkpoint's."""

_ZARRAY, _METADATA = ".zarray", "_METADATA"
_OF_PROCESSES = "array_metadatas/"
_BESIDE = re.compile(rf"_METADATA|_sharding|{_OF_PROCESSES}process_[0-9]{{1,9}}")
_MOST_ZARRAY_BYTES = 64 * 2**10
_MOST_BESIDE_BYTES = 2**28  # Orbax writes the whole mesh for each array
# What the files of arrays may have beyond the arrays' own bytes.
_SPARE_BYTES, _SPARE_BYTES_PER_ARRAY = 2**20, 64 * 2**10
_MOST_NAMED = 3
_TREE_KEYS = {
    "tree_metadata",
    "use_ocdbt",
    "use_zarr3",
    "store_array_data_equal_to_fill_value",
    "custom_metadata",
}


def verify(folder: Path, manifest: Manifest) -> None:
    """Check the checkpoint in `folder`: first what is small, then every byte.

    Args:
        folder: `manifest.json`, and the arrays in `state/`.
        manifest: from `read_manifest`.

    Raises:
        CheckpointError: it is not as it was written.
    """
    files = _files_of_arrays(manifest)
    _refuse(first_difference_in_size(folder, manifest.files))
    with open_folder(folder) as root:
        for name, entry in manifest.arrays.items():
            _check_array(root, name, entry, files[name])
        names = [name for name, entry in manifest.arrays.items() if entry.nbytes]
        _check_tree(root, names)
        for path in manifest.files:
            if path.startswith(f"{STATE}/{_OF_PROCESSES}"):
                _check_process(_json(root, path, _MOST_BESIDE_BYTES), path, set(names))
    _refuse(first_difference(folder, manifest.files))


def _refuse(reason: str | None) -> None:
    if reason:
        raise CheckpointError(reason)


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
            yield f"{shown(name)} is in it and not in this run"
        elif name not in arrays:
            yield f"{shown(name)} is in this run and not in it"
        elif arrays[name] != wanted[name]:
            yield f"{shown(name)} is {arrays[name]} in it and {wanted[name]} in this run"


def _files_of_arrays(manifest: Manifest) -> dict[str, dict[str, int]]:
    """Array name -> name -> bytes of each of its files; every other file must be Orbax's."""
    files: dict[str, dict[str, int]] = {name: {} for name in manifest.arrays}
    for path, file in manifest.files.items():
        state, _, rest = path.partition("/")
        array, _, name = rest.partition("/")
        if state == STATE and array in files:
            files[array][name] = file.bytes
        elif state != STATE or not _BESIDE.fullmatch(rest):
            raise CheckpointError(f"{shown(path)} belongs to no array, and Orbax does not write it")
        elif file.bytes > _MOST_BESIDE_BYTES:
            raise CheckpointError(
                f"{shown(path)} has {file.bytes} bytes; at most {_MOST_BESIDE_BYTES} are allowed"
            )
    found = sum(sum(each.values()) for each in files.values())
    own = sum(entry.nbytes for entry in manifest.arrays.values())
    most = own + _SPARE_BYTES + _SPARE_BYTES_PER_ARRAY * len(files)
    if found > most:
        raise CheckpointError(f"the files of its arrays have {found} bytes; at most {most} fit")
    return files


def _check_array(root: int, name: str, entry: ArrayEntry, files: Mapping[str, int]) -> None:
    if not entry.nbytes:  # Orbax writes nothing for it, and there is nothing to read
        _refuse(f"{shown(name)} is empty, and has files" if files else None)
        return
    path = f"{STATE}/{name}/{_ZARRAY}"
    chunk = _chunk_shape(_json(root, path, _MOST_ZARRAY_BYTES), entry, path)
    grid = [-(-dim // size) for dim, size in zip(entry.shape, chunk, strict=True)]
    chunks = {name: size for name, size in files.items() if name != _ZARRAY}
    if len(chunks) != math.prod(grid):
        raise CheckpointError(
            f"{shown(name)} has {len(chunks)} chunks of {list(chunk)}, and {entry} takes "
            f"{math.prod(grid)}"
        )
    nbytes = math.prod(chunk) * dtypes()[entry.dtype].itemsize
    for index in itertools.product(*map(range, grid)):
        key = ".".join(map(str, index)) or "0"
        if key not in chunks:
            raise CheckpointError(f"{STATE}/{shown(name)}/{key} is missing")
        if chunks[key] != nbytes:
            raise CheckpointError(
                f"{STATE}/{shown(name)}/{key} has {chunks[key]} bytes, and a chunk {list(chunk)} "
                f"of {entry.dtype} has {nbytes}"
            )


def _chunk_shape(zarray: Any, entry: ArrayEntry, path: str) -> list[int]:
    """The shape of the array's chunks; all else in `.zarray` must be as Orbax writes it."""
    wanted = {
        "compressor": None,
        "dimension_separator": ".",
        "dtype": _zarr_dtype(entry.dtype),
        "fill_value": None,
        "filters": None,
        "order": "C",
        "shape": list(entry.shape),
        "zarr_format": 2,
    }
    if not isinstance(zarray, dict):
        raise CheckpointError(f"{shown(path)} is no JSON object")
    said = {key: value for key, value in zarray.items() if key != "chunks"}
    if canonical(said) != canonical(wanted):
        raise CheckpointError(f"{shown(path)} {_first_difference(said, wanted)}")
    chunk = zarray.get("chunks")
    if not isinstance(chunk, list) or len(chunk) != len(entry.shape):
        raise CheckpointError(f"{shown(path)} has no chunks of {len(entry.shape)} dims")
    for size, dim in zip(chunk, entry.shape, strict=True):
        if type(size) is not int or not 1 <= size <= dim:
            raise CheckpointError(
                f"{shown(path)} has chunks {shown(canonical(chunk))} of shape {list(entry.shape)}"
            )
    return chunk


def _first_difference(said: dict[str, Any], wanted: dict[str, Any]) -> str:
    for key in sorted(said.keys() | wanted.keys()):
        if key not in said:
            return f"lacks {key}"
        if key not in wanted:
            return f"has {shown(key)}, which Orbax does not write"
        if canonical(said[key]) != canonical(wanted[key]):
            return f"has {key} {shown(canonical(said[key]))}; it is {canonical(wanted[key])}"
    return "is not as it was written"


def _zarr_dtype(name: str) -> str:
    dtype = dtypes()[name]
    return dtype.str if dtype.isbuiltin == 1 else name


def _check_tree(root: int, names: list[str]) -> None:
    """Hold Orbax's `_METADATA` against the arrays: it decides which class reads each of them."""
    path = f"{STATE}/{_METADATA}"
    tree = _json(root, path, _MOST_BESIDE_BYTES)
    if not isinstance(tree, dict) or not tree.keys() <= _TREE_KEYS:
        raise CheckpointError(f"{path} is not what Orbax writes for arrays")
    leaves = tree.get("tree_metadata")
    if not isinstance(leaves, dict) or leaves.keys() != {str((name,)) for name in names}:
        raise CheckpointError(f"{path} names other arrays than the manifest")
    if any(tree.get(key) for key in ("use_ocdbt", "use_zarr3", "custom_metadata")):
        raise CheckpointError(f"{path} is for another format than zarr 2")
    for name in names:
        if not _is_plain(leaves[str((name,))], name):
            raise CheckpointError(f"{path} describes {shown(name)} as something else than an array")


def _is_plain(leaf: Any, name: str) -> bool:
    if not isinstance(leaf, dict) or leaf.keys() != {"key_metadata", "value_metadata"}:
        return False
    value = leaf["value_metadata"]
    if not isinstance(value, dict):
        return False
    return (
        canonical(leaf["key_metadata"]) == canonical([{"key": name, "key_type": 2}])
        and value.keys() <= {"value_type", "skip_deserialize", "write_shape"}
        and value.get("value_type") == "jax.Array"
        and not value.get("skip_deserialize")
    )


def _check_process(said: Any, path: str, names: set[str]) -> None:
    """Orbax makes what `ext_metadata` says of an array: of plain ones, as here, nothing."""
    entries = said.get("array_metadatas") if isinstance(said, dict) and len(said) == 1 else None
    try:
        found = [entry["array_metadata"] for entry in entries] if type(entries) is list else [{}]
        plain = all(each["param_name"] in names and each["ext_metadata"] is None for each in found)
    except (KeyError, TypeError):
        plain = False
    if not plain:
        raise CheckpointError(f"{path} is not what Orbax writes for arrays")


def _json(root: int, path: str, most_bytes: int) -> Any:
    return parse(read(root, path, most_bytes), path)
