"""The arrays of a train state, written and read by Orbax.

The format is plain uncompressed zarr (version 2), one folder per array, so each file can be checked
before anything is read, also by its size, and Orbax alone can read the arrays as a dict. Hundreds
of small arrays are in a few files instead, which Orbax can read too; see `small.py`.
"""

import concurrent.futures
import contextlib
import functools
import hashlib
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import jax
import jax.numpy as jnp
import numpy as np

from replicax.core.data.per_row import padded_again, real_rows
from replicax.core.ground.leaves import is_random_key, numbers
from replicax.core.ground.train_state import TrainState, check_unused
from replicax.train.checkpoints.manifest import ArrayEntry
from replicax.train.checkpoints.small import (
    SMALL,
    STATE,
    is_small,
    place_small,
    read_small,
    small,
)
from replicax.train.checkpoints.whole import whole
from replicax.train.checkpoints.with_orbax import (
    begin_orbax,
    quiet_orbax,
    read_orbax,
    write_packed,
)

_LONGEST_NAME = 200  # bytes of a leaf's name, used as a folder name; most file systems allow 255


def array_entries(state: TrainState) -> dict[str, ArrayEntry]:
    """Return leaf name -> dtype and shape of each array in `state`, which may be abstract.

    Of an `rx.PerRow`, its real rows: the same on any number of devices.
    """
    plain = {name: _shape(leaf) for name, leaf in _named(real_rows(state)).items()}
    return {name: ArrayEntry(leaf.dtype.name, tuple(leaf.shape)) for name, leaf in plain.items()}


def begin_writing(state: TrainState, folder: Path) -> Callable[[], None]:
    """Copy `state` to the host and begin to write it into the checkpoint's `folder`.

    All processes must call it. Each writes its own shards, and process 0 the small arrays. Returns
    once the copy is made, so that the next step may consume `state`: a function that waits until
    all is written and raises any error.
    """
    found = _with_elements(_named(real_rows(state)))
    leaves = {name: numbers(leaf) for name, leaf in found.items()}
    tiny = {name: leaves.pop(name) for name in small(leaves)}
    values = whole(tiny)
    quiet = contextlib.ExitStack()
    quiet.enter_context(quiet_orbax())
    try:
        # Another thread, as that of a notebook runs an event loop.
        with concurrent.futures.ThreadPoolExecutor(1) as own:
            futures = own.submit(begin_orbax, folder / STATE, leaves).result()
    except BaseException:
        quiet.close()
        raise

    def wait() -> None:
        waits = [future.result for future in futures]
        if values and jax.process_index() == 0:
            waits.append(functools.partial(write_packed, folder / SMALL, values))
        errors = []
        with quiet:
            for finished in waits:  # all of them, so that no write continues
                try:
                    finished()
                except Exception as error:
                    errors.append(error)
        if errors:
            raise errors[0]

    return wait


def read(like: TrainState, folder: Path) -> TrainState:
    """Return the state of the checkpoint in `folder`, sharded like `like`.

    Each process reads its own shards, and all small arrays.
    """
    like, padded = real_rows(like), like
    leaves = _named(like)
    wanted = {
        name: jax.ShapeDtypeStruct(plain.shape, plain.dtype, sharding=leaf.sharding)
        for name, leaf in _with_elements(leaves).items()
        for plain in [_shape(leaf)]
    }
    values = read_small(folder)
    tiny = {name: wanted.pop(name) for name in values.keys() & wanted.keys()}
    arrays = read_orbax(folder / STATE, wanted)
    if next(iter(jax.tree.leaves(like)[0].sharding.device_set)).platform == "cpu":
        # Several devices may share one host buffer, and a step with donated inputs writes to it.
        arrays = jax.block_until_ready(jax.jit(lambda read: jax.tree.map(jnp.copy, read))(arrays))
    arrays |= place_small(values, tiny)
    found = [
        as_key(arrays[name], leaf)
        if name in arrays
        else jnp.zeros(leaf.shape, leaf.dtype, device=leaf.sharding)
        for name, leaf in leaves.items()
    ]
    state: TrainState = padded_again(jax.tree.unflatten(jax.tree.structure(like), found), padded)
    return state


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


def _with_elements(leaves: dict[str, Any]) -> dict[str, Any]:
    """Return the non-empty leaves, as Orbax rejects empty arrays."""
    return {name: leaf for name, leaf in leaves.items() if math.prod(leaf.shape)}


def _shape(leaf: Any) -> Any:
    """Return a leaf's dtype and shape: of keys, those of their numbers."""
    return jax.eval_shape(numbers, leaf) if is_random_key(leaf) else leaf


def _named(tree: Any) -> dict[str, Any]:
    """Return leaf name -> leaf. Names are valid folder names such as `params.dense.kernel`."""
    return {_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def _name(path: Sequence[Any]) -> str:
    parts = [jax.tree_util.keystr((key,), simple=True) for key in path]
    name = ".".join(quote(part, safe="").replace(".", "%2E") or "%" for part in parts)
    if len(name) <= _LONGEST_NAME:
        return name
    return f"{name[:_LONGEST_NAME]}~{hashlib.sha256(name.encode()).hexdigest()[:16]}"


def params_not_finite(state: TrainState) -> set[str]:
    """Return the leaf names of the parameters with non-finite elements.

    Raises:
        StateError: the state was already consumed.
    """
    check_unused(state)
    found = {
        name: leaf
        for name, leaf in _named(state.params).items()
        if jnp.issubdtype(leaf.dtype, jnp.inexact)
    }
    # A program of hundreds of small arrays would take seconds to compile.
    tiny = {name: found.pop(name) for name in [name for name in found if is_small(found[name])]}
    finite = jax.device_get(_finite(found)) if found else {}
    finite |= {name: np.isfinite(value).all() for name, value in whole(tiny).items()}
    return {f"params.{name}" for name, each in finite.items() if not each}


@jax.jit
def _finite(leaves: dict[str, jax.Array]) -> dict[str, jax.Array]:
    return {name: jnp.isfinite(leaf).all() for name, leaf in leaves.items()}
