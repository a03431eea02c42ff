"""The arrays of a train state, written and read by Orbax.

As plain zarr (version 2), an array a folder and without compression: so each file can be checked
before anything is read, by its size as well, and whoever has Orbax can read them as a dict.
"""

import asyncio
import concurrent.futures
import hashlib
import logging
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import jax
import jax.numpy as jnp

from replicax.core.leaves import is_random_key, numbers
from replicax.core.update import TrainState
from replicax.errors import CheckpointError, require
from replicax.train.checkpoints.manifest import ArrayEntry

_LONGEST_NAME = 200  # bytes of a leaf's name, which is that of a folder; most file systems take 255


def array_entries(state: TrainState) -> dict[str, ArrayEntry]:
    """Leaf name -> dtype and shape of each array of `state`, or of its abstract twin."""
    plain = {name: jax.eval_shape(numbers, leaf) for name, leaf in named(state).items()}
    return {name: ArrayEntry(leaf.dtype.name, tuple(leaf.shape)) for name, leaf in plain.items()}


def begin_writing(state: TrainState, folder: Path) -> Callable[[], None]:
    """Copy `state` to the host and begin to write it into `folder`, which need not be there.

    Each process writes its own parts. Returns once the copy is made, as the next step may have
    `state`, what waits until these parts are written, and raises what went wrong.
    """
    epath = require("etils.epath", "checkpoints")
    args = require("orbax.checkpoint", "checkpoints").args.PyTreeSave(_with_elements(named(state)))
    folder.mkdir(parents=True, exist_ok=True)
    saving = _handler().async_save(epath.Path(folder), args=args)
    with concurrent.futures.ThreadPoolExecutor(1) as own:  # in a notebook this one has a loop
        futures = own.submit(asyncio.run, saving).result() or ()

    def wait() -> None:
        errors = []
        for future in futures:  # all of them, so that nobody writes on
            try:
                future.result()
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]

    return wait


def read(like: TrainState, folder: Path) -> TrainState:
    """The state in `folder`, laid out as `like`; each process reads its own parts."""
    orbax, epath = require("orbax.checkpoint", "checkpoints"), require("etils.epath", "checkpoints")
    leaves = named(like)
    wanted = _with_elements(leaves)
    arguments = {
        name: orbax.ArrayRestoreArgs(
            sharding=leaves[name].sharding, global_shape=leaf.shape, dtype=leaf.dtype
        )
        for name, leaf in wanted.items()
    }
    restore = orbax.args.PyTreeRestore(item=wanted, restore_args=arguments, partial_restore=True)
    try:
        arrays = _handler().restore(epath.Path(folder), args=restore)
    except Exception as error:  # tensorstore's own, of many kinds
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise CheckpointError(f"{folder} cannot be read: {lines[0]}") from error
    found = [
        arrays[name] if name in wanted else jnp.zeros(leaf.shape, leaf.dtype, device=leaf.sharding)
        for name, leaf in leaves.items()
    ]
    if next(iter(found[0].devices())).platform == "cpu":
        # Several devices may share the host's memory, and a step that is given it writes there.
        found = jax.block_until_ready(jax.jit(lambda leaves: jax.tree.map(jnp.copy, leaves))(found))
    keyed = map(as_key, found, leaves.values())
    state: TrainState = jax.tree.unflatten(jax.tree.structure(like), keyed)
    return state


def abstract(state: TrainState) -> TrainState:
    """The shapes and shardings of `state`, without its arrays."""
    shapes: TrainState = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), state
    )
    return shapes


def as_key(leaf: jax.Array, like: Any) -> jax.Array:
    """Return `leaf`, or the keys whose data it holds where `like` is of keys."""
    if not is_random_key(like):
        return leaf
    impl: list[Any] = []  # JAX tells it of arrays alone
    jax.eval_shape(lambda keys: impl.append(jax.random.key_impl(keys)), like)
    keys: jax.Array = jax.random.wrap_key_data(leaf, impl=impl[0])
    return keys


def _with_elements(leaves: dict[str, Any]) -> dict[str, Any]:
    """Without the arrays that have none, which Orbax does not take; of keys their numbers."""
    found = {}
    for name, leaf in leaves.items():
        data = jax.eval_shape(numbers, leaf) if isinstance(leaf, jax.ShapeDtypeStruct) else leaf
        if math.prod(leaf.shape):
            found[name] = numbers(data)
    return found


def named(tree: Any) -> dict[str, Any]:
    """Leaf name -> leaf. A name is that of a folder, made of the path: `params.dense.kernel`."""
    return {_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def _name(path: Sequence[Any]) -> str:
    parts = [jax.tree_util.keystr((key,), simple=True) for key in path]
    name = ".".join(quote(part, safe="").replace(".", "%2E") or "%" for part in parts)
    if len(name) <= _LONGEST_NAME:
        return name
    return f"{name[:_LONGEST_NAME]}~{hashlib.sha256(name.encode()).hexdigest()[:16]}"


def _handler() -> Any:
    # Orbax's checkpointers have barriers of their own, which time out where one process fails.
    logging.getLogger("absl").setLevel(logging.CRITICAL)  # errors are raised as well
    orbax = require("orbax.checkpoint", "checkpoints")
    # Else each replica's device copies a part of what all hold: of each array a slice, a program
    # compiled and run for it. A save then stalls 2.5 times as long on a CPU, the first for seconds.
    arrays = orbax.type_handlers.ArrayHandler(use_replica_parallel=False)
    return orbax.PyTreeCheckpointHandler(
        use_ocdbt=False,
        use_zarr3=False,
        use_compression=False,
        type_handler_registry=orbax.type_handlers.create_type_handler_registry((jax.Array, arrays)),
    )


def params_not_finite(state: TrainState) -> set[str]:
    """Leaf names of the parameters that have an element which is not finite."""
    found = {
        name: leaf
        for name, leaf in named(state.params).items()
        if jnp.issubdtype(leaf.dtype, jnp.inexact)
    }
    return {f"params.{name}" for name, finite in _finite(found).items() if not bool(finite)}


@jax.jit
def _finite(leaves: dict[str, jax.Array]) -> dict[str, jax.Array]:
    return {name: jnp.isfinite(leaf).all() for name, leaf in leaves.items()}
