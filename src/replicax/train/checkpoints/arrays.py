"""The arrays of a train state, written and read by Orbax.

    default/        a checkpoint of Orbax: the state as the tree that it is

The chunks are uncompressed, so that their sizes are known before anything is read.
"""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from replicax.core.data.per_row import padded_again, real_rows
from replicax.core.ground.leaves import PyTree, is_random_key, numbers
from replicax.core.ground.train_state import TrainState, check_unused
from replicax.errors import ConfigError, require
from replicax.train.checkpoints.manifest import ArrayEntry
from replicax.train.checkpoints.whole import whole
from replicax.train.checkpoints.with_orbax import (
    begin_orbax,
    is_packed,
    quiet_orbax,
    read_arrays,
    read_whole,
    write_tree,
)

ITEM = "default"
"""The arrays' folder within a checkpoint's folder, and Orbax's name for an only item."""


def array_entries(state: PyTree) -> dict[str, ArrayEntry]:
    """Return leaf name -> dtype and shape of each array in `state`, which may be abstract.

    Of an `rx.ByRow`, its real rows: the same on any number of devices.
    """
    plain = {name: _shape(leaf) for name, leaf in named_leaves(real_rows(state)).items()}
    return {name: ArrayEntry(leaf.dtype.name, tuple(leaf.shape)) for name, leaf in plain.items()}


def check_storable(state: TrainState) -> None:
    """Raise `ConfigError` if TensorStore, which writes checkpoints, lacks an array's dtype."""
    known = require("tensorstore", "checkpoints").dtype
    for name, leaf in named_leaves(real_rows(state)).items():
        try:
            known(_shape(leaf).dtype.name)
        except ValueError:
            raise ConfigError(
                f"{name} is {leaf.dtype}, which a checkpoint cannot hold: cast it (uint4 to uint8 "
                "or int4), or run without a run_dir"
            ) from None


def begin_writing(state: TrainState, folder: Path, *, packed: bool = True) -> Callable[[], None]:
    """Copy `state` to the host and begin to write it into the checkpoint's `folder`.

    All processes must call it. Each writes its own shards, and process 0 the small arrays. Returns
    once the copy is made, so that the next step may consume `state`: a function that waits until
    all is written and raises any error. Then process 0 calls `finish_orbax`.
    """
    real = real_rows(state)
    plain = _plainly_named(real)
    named = named_leaves(real)
    leaves = {name: numbers(leaf) for name, leaf in _with_elements(named).items()}
    # Here Orbax would take seconds for a thousand small arrays.
    tiny = {name: leaves.pop(name) for name in small(leaves)}
    tree: PyTree = whole(tiny)
    tree |= {name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for name, leaf in leaves.items()}
    if plain is not None:
        tree = jax.tree.unflatten(jax.tree.structure(real), map(tree.get, named))
    with quiet_orbax():
        futures = begin_orbax(folder / ITEM, leaves, packed=packed)

    def wait() -> None:
        with quiet_orbax():
            write_tree(folder / ITEM, tree, futures, packed=packed)

    return wait


def read(like: TrainState, folder: Path) -> TrainState:
    """Return the state of the checkpoint in `folder`, sharded like `like`.

    Each process reads its own shards, and all small arrays.
    """
    like, padded = real_rows(like), like
    arrays = read_named(named_leaves(like), folder)
    state: TrainState = padded_again(
        jax.tree.unflatten(jax.tree.structure(like), arrays.values()), padded
    )
    return state


def read_named(leaves: Mapping[str, Any], folder: Path) -> dict[str, jax.Array]:
    """Return arrays of the checkpoint in `folder` by name, sharded like `leaves`."""
    item = folder / ITEM
    wanted = {
        name: jax.ShapeDtypeStruct(plain.shape, plain.dtype, sharding=leaf.sharding)
        for name, leaf in _with_elements(leaves).items()
        for plain in [_shape(leaf)]
    }
    tiny = {name: leaf for name, leaf in wanted.items() if is_small(leaf)}
    values = read_whole(item, tiny) if is_packed(item) else {}
    arrays = read_arrays(item, {name: wanted[name] for name in wanted.keys() - values.keys()})
    if next(iter(next(iter(leaves.values())).sharding.device_set)).platform == "cpu":
        # Several devices may share one host buffer, and a step with donated inputs writes to it.
        arrays = jax.block_until_ready(jax.jit(lambda read: jax.tree.map(jnp.copy, read))(arrays))
    arrays |= place_small(values, {name: tiny[name] for name in values})
    return {
        name: as_key(arrays[name], leaf)
        if name in arrays
        else jnp.zeros(leaf.shape, leaf.dtype, device=leaf.sharding)
        for name, leaf in leaves.items()
    }


def abstract(state: TrainState) -> TrainState:
    """Return the shapes, dtypes and shardings of `state`."""
    shapes: TrainState = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), state
    )
    return shapes


def as_key(leaf: jax.Array, like: Any) -> jax.Array:
    """Return `leaf`, or the keys whose data it holds if `like` is an array of keys."""
    if not is_random_key(like):
        return leaf
    impl: list[Any] = []  # JAX reports it for arrays only
    jax.eval_shape(lambda keys: impl.append(jax.random.key_impl(keys)), like)
    keys: jax.Array = jax.random.wrap_key_data(leaf, impl=impl[0])
    return keys


def _with_elements(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """Return the non-empty leaves, as Orbax rejects empty arrays."""
    return {name: leaf for name, leaf in leaves.items() if math.prod(leaf.shape)}


def _shape(leaf: Any) -> Any:
    """Return a leaf's dtype and shape: of keys, those of their numbers."""
    return jax.eval_shape(numbers, leaf) if is_random_key(leaf) else leaf


def named_leaves(tree: PyTree) -> dict[str, Any]:
    """Return leaf name -> leaf: names such as `params.dense.kernel`, which are Orbax's as well."""
    plain = _plainly_named(tree)
    if plain is not None:
        return plain
    return {_quoted(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def _plainly_named(tree: PyTree) -> dict[str, Any] | None:
    """Return None if two leaves have one name in Orbax, as those of `{"a.b": 1, "a": {"b": 2}}`."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    named = {_plain(path): leaf for path, leaf in leaves}
    return named if len(named) == len(leaves) else None


def _plain(path: Sequence[Any]) -> str:
    return ".".join(jax.tree_util.keystr((key,), simple=True) for key in path)


def _quoted(path: Sequence[Any]) -> str:
    parts = [jax.tree_util.keystr((key,), simple=True) for key in path]
    return ".".join(quote(part, safe="").replace(".", "%2E") or "%" for part in parts)


def params_not_finite(state: TrainState) -> set[str]:
    """Return the leaf names of the parameters with non-finite elements.

    Raises:
        StateError: the state was already consumed.
    """
    check_unused(state)
    floats = {
        name: leaf
        for name, leaf in named_leaves(state.params).items()
        if jnp.issubdtype(leaf.dtype, jnp.inexact)
    }
    # A program of hundreds of small arrays would take seconds to compile.
    tiny = {name: floats.pop(name) for name in [n for n in floats if is_small(floats[n])]}
    finite = jax.device_get(_finite(floats)) if floats else {}
    finite |= {name: np.isfinite(value).all() for name, value in whole(tiny).items()}
    return {f"params.{name}" for name, is_finite in finite.items() if not is_finite}


@jax.jit
def _finite(leaves: dict[str, jax.Array]) -> dict[str, jax.Array]:
    return {name: jnp.isfinite(leaf).all() for name, leaf in leaves.items()}


_MOST_BYTES = 2**18
_FEWEST = 256
"""Usual models have fewer, of which Orbax then knows the shardings."""


def is_small(leaf: Any) -> bool:
    """Whether an array or its shape is small, on all its devices together."""
    size: int = math.prod(leaf.shape) * np.dtype(leaf.dtype).itemsize
    return size <= _MOST_BYTES


def small(leaves: Mapping[str, jax.Array]) -> list[str]:
    """Return the names of the arrays to copy together, the same in all processes."""
    names = sorted(name for name, leaf in leaves.items() if is_small(leaf))
    return names if len(names) >= _FEWEST else []


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
