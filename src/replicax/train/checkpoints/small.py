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

from replicax.train.checkpoints.with_orbax import read_packed

STATE = "state"
"""The arrays' folder within a checkpoint's folder."""
SMALL = "small"
"""The folder next to it with the small arrays, if there are many."""
_OLD = "small.bin"
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


def read_small(folder: Path) -> dict[str, bytes]:
    """Return the contents of each small array of the checkpoint in `folder`."""
    if (folder / SMALL).is_dir():
        return read_packed(folder / SMALL)
    try:
        header, _, data = (folder / STATE / _OLD).read_bytes().partition(b"\n")
    except FileNotFoundError:
        return {}
    found, start = {}, 0
    for name, size in msgspec.json.decode(header, type=dict[str, int]).items():
        found[name] = data[start : start + size]
        start += size
    return found


def place_small(values: Mapping[str, bytes], like: Mapping[str, Any]) -> dict[str, jax.Array]:
    """Return arrays with the contents `values`, as `like`; each device's part in its own memory."""
    parts, places = [], []
    for name, leaf in like.items():
        array = np.frombuffer(values[name], leaf.dtype).reshape(leaf.shape)
        for device, index in leaf.sharding.addressable_devices_indices_map(leaf.shape).items():
            parts.append(np.array(array[index]))  # on a CPU, JAX may use this memory
            places.append(SingleDeviceSharding(device, memory_kind=leaf.sharding.memory_kind))
    put = iter(jax.device_put(parts, places))
    return {
        name: jax.make_array_from_single_device_arrays(
            leaf.shape,
            leaf.sharding,
            list(itertools.islice(put, len(leaf.sharding.addressable_devices))),
            dtype=leaf.dtype,
        )
        for name, leaf in like.items()
    }
