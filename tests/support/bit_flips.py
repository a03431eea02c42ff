"""One flipped bit in one device's copy of one array: a fault of memory, made on purpose."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import jax
import numpy as np

import replicax as rx
from replicax.core.data_parallel import DataParallel


def flip(array: jax.Array, device: jax.Device, byte: int, bit: int) -> jax.Array:
    """`array` with one bit flipped in the copy (or part) that `device` holds, and nowhere else.

    `array` can still be used. In a job every process calls it alike.
    """
    is_key = jax.numpy.issubdtype(array.dtype, jax.dtypes.prng_key)
    data = jax.random.key_data(array) if is_key else array
    parts = []
    for shard in data.addressable_shards:
        host = np.array(shard.data, copy=True, order="C")
        if shard.device == device:
            host.reshape(-1).view(np.uint8)[byte] ^= np.uint8(1 << bit)
        parts.append(jax.device_put(host, shard.device))
    flipped = jax.make_array_from_single_device_arrays(data.shape, data.sharding, parts)
    return jax.random.wrap_key_data(flipped) if is_key else flipped


def flip_leaf(state: Any, leaf: int, device: jax.Device, byte: int, bit: int) -> Any:
    """`state` with one bit flipped in the `leaf`th of its leaves; `step` may donate all of it."""
    leaves, tree = jax.tree.flatten(state)
    leaves[leaf] = flip(leaves[leaf], device, byte, bit)
    return jax.tree.unflatten(tree, leaves)


def leaf_names(state: Any) -> list[str]:
    """Paths of the leaves of `state`, as messages have them."""
    return [jax.tree_util.keystr(p).lstrip(".") for p, _ in jax.tree.leaves_with_path(state)]


def part_bytes(array: jax.Array) -> int:
    """Bytes of what one device holds of `array`."""
    if jax.numpy.issubdtype(array.dtype, jax.dtypes.prng_key):
        array = jax.random.key_data(array)
    return int(array.addressable_data(0).nbytes)


@contextlib.contextmanager
def before_step(number: int, change: Callable[[Any], Any], times: int = 1) -> Iterator[None]:
    """Within it, `change` is done to the state that goes into the `number`th step from here on.

    Args:
        number: from 1.
        change: of a state.
        times: how many steps in a row it is done to; replayed steps count like any.
    """
    step = DataParallel.step
    calls = 0

    def changed(self: rx.DataParallel, state: Any, batch: Any) -> Any:
        nonlocal calls
        calls += 1
        if number <= calls < number + times:
            state = change(state)
        return step(self, state, batch)

    with mock.patch.object(DataParallel, "step", changed):
        yield
