"""Small arrays of a checkpoint, in a few files if there are many.

    small/           an Orbax checkpoint of these arrays, packed by Orbax (OCDBT)
    state/small.bin  instead, before there was such a folder: a line of JSON that names them

In `state` Orbax makes a folder for each array and syncs its files: a thousand take seconds.
"""

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import msgspec
import numpy as np
from jax.sharding import SingleDeviceSharding

from replicax.errors import CheckpointError, require
from replicax.train.checkpoints.with_orbax import write_packed

STATE = "state"
"""The arrays' folder within a checkpoint's folder."""
_SMALL, _OLD = "small", "small.bin"
_MOST_BYTES = 2**18
_FEWEST = 256
"""Usual models have fewer, and remain one tree of arrays."""


def is_small(leaf: jax.Array) -> bool:
    """Whether an array is small, on all its devices together."""
    return leaf.nbytes <= _MOST_BYTES


def small(leaves: Mapping[str, jax.Array]) -> list[str]:
    """Return the names of the arrays to pack, the same in all processes."""
    found = sorted(name for name, leaf in leaves.items() if is_small(leaf))
    if len(found) < _FEWEST:
        return []
    return found[len(found) == len(leaves) :]  # Orbax writes no checkpoint without an array


def write_small(folder: Path, values: Mapping[str, np.ndarray]) -> None:
    """Write the arrays of a checkpoint in `folder`; they are on disk when this returns."""
    write_packed(folder / _SMALL, values)


def read_small(folder: Path) -> dict[str, bytes]:
    """Return the contents of each small array of the checkpoint in `folder`."""
    if (folder / _SMALL).is_dir():
        return _read_packed(folder / _SMALL)
    try:
        header, _, data = (folder / STATE / _OLD).read_bytes().partition(b"\n")
    except FileNotFoundError:
        return {}
    found, start = {}, 0
    for name, size in msgspec.json.decode(header, type=dict[str, int]).items():
        found[name] = data[start : start + size]
        start += size
    return found


def _read_packed(folder: Path) -> dict[str, bytes]:
    """Return what Orbax packed: of each array, one uncompressed chunk of zarr, which is all of it.

    Not read by Orbax, which takes ten times as long and reads missing chunks as zeros.
    """
    base = {"driver": "file", "path": f"{folder}/"}
    try:
        opened = require("tensorstore", "checkpoints").KvStore.open
        store = opened({"driver": "ocdbt", "base": base}).result()
        keys = [key for key in store.list().result() if not key.endswith(b"/.zarray")]
        reads = [store.read(key) for key in keys]
        values = [read.result().value for read in reads]
    except ValueError as error:  # all of tensorstore's
        raise CheckpointError(f"{folder} cannot be read: {str(error).splitlines()[0]}") from error
    return {key.decode().rpartition("/")[0]: each for key, each in zip(keys, values, strict=True)}


def place_small(values: Mapping[str, bytes], like: Mapping[str, Any]) -> dict[str, jax.Array]:
    """Return arrays with the contents `values`, as `like`; each device's part in its own memory."""
    parts, places = [], []
    for name, leaf in like.items():
        array = np.frombuffer(values[name], leaf.dtype).reshape(leaf.shape)
        for device, index in leaf.sharding.addressable_devices_indices_map(leaf.shape).items():
            parts.append(np.asarray(array[index]))
            places.append(SingleDeviceSharding(device, memory_kind=leaf.sharding.memory_kind))
    put = iter(jax.device_put(parts, places, may_alias=False))
    return {
        name: jax.make_array_from_single_device_arrays(
            leaf.shape,
            leaf.sharding,
            list(itertools.islice(put, len(leaf.sharding.addressable_devices))),
            dtype=leaf.dtype,
        )
        for name, leaf in like.items()
    }
