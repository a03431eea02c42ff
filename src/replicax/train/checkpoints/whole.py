"""Small arrays, whole on the host of each process, also those of which it has only shards."""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Sharding

_MOST_AT_ONCE = 2**26
"""Bytes that one exchange between the processes takes on each device."""


def whole(leaves: Mapping[str, jax.Array]) -> dict[str, np.ndarray]:
    """Return copies of `leaves` on the host; all processes must call this together."""
    spread = {
        name: leaf
        for name, leaf in sorted(leaves.items())
        if not (leaf.is_fully_addressable or leaf.is_fully_replicated)
    }
    here = jax.device_get({name: leaf for name, leaf in leaves.items() if name not in spread})
    # Copies, as on a CPU the host's arrays are the memory that the next step writes to.
    return {name: value.copy() for name, value in here.items()} | _exchanged(spread)


def _exchanged(leaves: Mapping[str, jax.Array]) -> dict[str, np.ndarray]:
    """Return arrays that span processes; not one by one, which would take a program for each."""
    if not leaves:
        return {}
    arrays = {name: np.empty(leaf.shape, leaf.dtype) for name, leaf in leaves.items()}
    parts_of = functools.cache(_parts)  # one layout is that of many arrays
    sizes, mine, parts = [0] * jax.process_count(), [np.empty(0, np.uint8)], []
    for name, leaf in leaves.items():
        data = {shard.device: shard.data for shard in leaf.addressable_shards}
        for device, index in parts_of(leaf.sharding, leaf.shape):
            part = arrays[name][index]
            parts.append((device.process_index, part))
            sizes[device.process_index] += part.nbytes
            if device.process_index == jax.process_index():
                mine.append(np.asarray(data[device]).reshape(-1).view(np.uint8))
    sent = np.zeros(max(sizes), np.uint8)
    sent[: sizes[jax.process_index()]] = np.concatenate(mine)
    most = _MOST_AT_ONCE // len(sizes)
    pieces = [sent[start : start + most] for start in range(0, len(sent), most)]
    rows = np.concatenate([multihost_utils.process_allgather(piece) for piece in pieces], axis=1)
    starts = [0] * len(sizes)
    for process, part in parts:
        start = starts[process]
        starts[process] = end = start + part.nbytes
        part[...] = rows[process, start:end].view(part.dtype).reshape(part.shape)
    return arrays


def _parts(sharding: Sharding, shape: tuple[int, ...]) -> list[tuple[jax.Device, Any]]:
    """Return each part of an array once: the first device that has it, and its index."""
    first: dict[Any, tuple[jax.Device, Any]] = {}
    for device, index in sharding.devices_indices_map(shape).items():
        bounds = [part.indices(size) for part, size in zip(index, shape, strict=True)]
        first.setdefault(tuple(bounds), (device, index))
    return list(first.values())
