"""The arrays of a train state, written and read by Orbax.

The format is plain uncompressed zarr (version 2), one folder per array, so each file can be checked
before anything is read, also by its size, and Orbax alone can read the arrays as a dict. Hundreds
of small arrays are in one file instead; see `small.py`.
"""

import asyncio
import concurrent.futures
import contextlib
import hashlib
import inspect
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import jax
import jax.numpy as jnp
import numpy as np

from replicax.core.data.per_row import padded_again, real_rows
from replicax.core.ground.leaves import is_random_key, numbers
from replicax.core.ground.train_state import TrainState, check_unused
from replicax.errors import CheckpointError, require
from replicax.train.checkpoints.manifest import ArrayEntry
from replicax.train.checkpoints.small import read_small, small, write_small

_LONGEST_NAME = 200  # bytes of a leaf's name, used as a folder name; most file systems allow 255


def array_entries(state: TrainState) -> dict[str, ArrayEntry]:
    """Return leaf name -> dtype and shape of each array in `state`, which may be abstract.

    Of an `rx.PerRow`, its real rows: the same on any number of devices.
    """
    real = _named(real_rows(state))
    plain = {name: jax.eval_shape(numbers, leaf) for name, leaf in real.items()}
    return {name: ArrayEntry(leaf.dtype.name, tuple(leaf.shape)) for name, leaf in plain.items()}


def begin_writing(state: TrainState, folder: Path) -> Callable[[], None]:
    """Copy `state` to the host and begin to write it into `folder`, which is created if missing.

    Each process writes its own shards. Returns once the copy is made, so that the next step may
    consume `state`: a function that waits until the shards are written and raises any error.
    """
    epath = require("etils.epath", "checkpoints")
    leaves = _with_elements(_named(real_rows(state)))
    tiny = {name: leaves.pop(name) for name in small(leaves)}
    values = {name: value.tobytes() for name, value in jax.device_get(tiny).items()}
    args = require("orbax.checkpoint", "checkpoints").args.PyTreeSave(leaves)
    folder.mkdir(parents=True, exist_ok=True)
    quiet = contextlib.ExitStack()
    quiet.enter_context(_quiet_orbax())
    try:
        saving = _handler().async_save(epath.Path(folder), args=args)
        # Another thread, as that of a notebook runs an event loop.
        with concurrent.futures.ThreadPoolExecutor(1) as own:
            futures = own.submit(asyncio.run, saving).result() or ()
    except BaseException:
        quiet.close()
        raise

    def wait() -> None:
        errors = []
        with quiet:
            for future in futures:  # all of them, so that no write continues
                try:
                    future.result()
                except Exception as error:
                    errors.append(error)
        if errors:
            raise errors[0]
        if values and jax.process_index() == 0:
            write_small(folder, values)

    return wait


def read(like: TrainState, folder: Path) -> TrainState:
    """Return the state in `folder`, sharded like `like`; each process reads its own shards."""
    orbax, epath = require("orbax.checkpoint", "checkpoints"), require("etils.epath", "checkpoints")
    like, padded = real_rows(like), like
    leaves = _named(like)
    wanted, values = _with_elements(leaves), read_small(folder)
    tiny = {name: wanted.pop(name) for name in values.keys() & wanted.keys()}
    arguments = {
        name: orbax.ArrayRestoreArgs(
            sharding=leaves[name].sharding, global_shape=leaf.shape, dtype=leaf.dtype
        )
        for name, leaf in wanted.items()
    }
    restore = orbax.args.PyTreeRestore(item=wanted, restore_args=arguments, partial_restore=True)
    arrays = {name: _placed(values[name], leaf, leaves[name]) for name, leaf in tiny.items()}
    try:
        with _quiet_orbax():
            arrays |= _handler().restore(epath.Path(folder), args=restore) if wanted else {}
    except Exception as error:  # tensorstore raises many types
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise CheckpointError(f"{folder} cannot be read: {lines[0]}") from error
    found = [
        arrays[name] if name in arrays else jnp.zeros(leaf.shape, leaf.dtype, device=leaf.sharding)
        for name, leaf in leaves.items()
    ]
    if next(iter(found[0].devices())).platform == "cpu":
        # Several devices may share one host buffer, and a step with donated inputs writes to it.
        found = jax.block_until_ready(jax.jit(lambda leaves: jax.tree.map(jnp.copy, leaves))(found))
    keyed = map(as_key, found, leaves.values())
    state: TrainState = padded_again(jax.tree.unflatten(jax.tree.structure(like), keyed), padded)
    return state


def _placed(value: bytes, leaf: Any, like: Any) -> jax.Array:
    """Return an array of the bytes `value`, as `leaf` says, and laid out as `like`."""
    array = np.frombuffer(value, leaf.dtype).reshape(leaf.shape)
    return jax.make_array_from_callback(leaf.shape, like.sharding, lambda index: array[index])


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
    """Return the non-empty leaves, as Orbax rejects empty arrays; keys become their key data."""
    found = {}
    for name, leaf in leaves.items():
        data = jax.eval_shape(numbers, leaf) if isinstance(leaf, jax.ShapeDtypeStruct) else leaf
        if math.prod(leaf.shape):
            found[name] = numbers(data)
    return found


def _named(tree: Any) -> dict[str, Any]:
    """Return leaf name -> leaf. Names are valid folder names such as `params.dense.kernel`."""
    return {_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def _name(path: Sequence[Any]) -> str:
    parts = [jax.tree_util.keystr((key,), simple=True) for key in path]
    name = ".".join(quote(part, safe="").replace(".", "%2E") or "%" for part in parts)
    if len(name) <= _LONGEST_NAME:
        return name
    return f"{name[:_LONGEST_NAME]}~{hashlib.sha256(name.encode()).hexdigest()[:16]}"


@contextlib.contextmanager
def _quiet_orbax() -> Iterator[None]:
    """Drop what Orbax logs meanwhile, as its errors are also raised; others log as before."""
    package = str(Path(inspect.getfile(require("orbax.checkpoint", "checkpoints"))).parent)
    logger = logging.getLogger("absl")  # which others log to as well

    def passes(record: logging.LogRecord) -> bool:
        return not record.pathname.startswith(package)

    logger.addFilter(passes)
    try:
        yield
    finally:
        logger.removeFilter(passes)


def _handler() -> Any:
    # Not an Orbax checkpointer: its barriers time out if one process fails.
    orbax = require("orbax.checkpoint", "checkpoints")
    # By default each replica copies a slice of every replicated array, with a program compiled for
    # it. A save then stalls training 2.5 times as long on a CPU, and the first one for seconds.
    arrays = orbax.type_handlers.ArrayHandler(use_replica_parallel=False)
    return orbax.PyTreeCheckpointHandler(
        use_ocdbt=False,
        use_zarr3=False,
        use_compression=False,
        type_handler_registry=orbax.type_handlers.create_type_handler_registry((jax.Array, arrays)),
    )


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
    # A program of hundreds of scalars would take seconds to compile.
    tiny = jax.device_get({name: found.pop(name) for name in small(found)})
    finite = {name: np.isfinite(value).all() for name, value in tiny.items()} | _finite(found)
    return {f"params.{name}" for name, each in finite.items() if not bool(each)}


@jax.jit
def _finite(leaves: dict[str, jax.Array]) -> dict[str, jax.Array]:
    return {name: jnp.isfinite(leaf).all() for name, leaf in leaves.items()}
