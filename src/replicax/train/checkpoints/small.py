"""Small arrays of a checkpoint: copied together, and placed together.

One by one, Orbax takes seconds for a thousand of them.
"""

import itertools
import math
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

_MOST_BYTES = 2**18
_FEWEST = 256
"""Usual models have fewer, of which Orbax then knows the shardings."""


def is_small(leaf: Any) -> bool:
    """Whether an array or its shape is small, on all its devices together."""
    size: int = math.prod(leaf.shape) * np.dtype(leaf.dtype).itemsize
    return size <= _MOST_BYTES


def small(leaves: Mapping[str, jax.Array]) -> list[str]:
    """Return the names of the arrays to copy together, the same in all processes."""
    found = sorted(name for name, leaf in leaves.items() if is_small(leaf))
    return found if len(found) >= _FEWEST else []


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
