"""Arrays written and read by Orbax: uncompressed, without barriers, and silent."""

import asyncio
import contextlib
import inspect
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from replicax.errors import CheckpointError, require


def begin_orbax(folder: Path, arrays: Mapping[str, jax.Array]) -> Any:
    """Copy `arrays` and begin to write each into a folder of `folder`; return Orbax's futures.

    In a thread without an event loop.
    """
    return _begun(_handler(), folder, arrays)


def write_packed(folder: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Write `arrays` into a few files; they are on disk when this returns."""
    handler = _handler(packed=True)
    for future in _begun(handler, folder, arrays):
        future.result()
    handler.finalize(_epath(folder))


def read_orbax(folder: Path, like: dict[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
    """Return arrays of one folder each in `folder`, as `like`: each process its own shards."""
    if not like:
        return {}
    orbax = require("orbax.checkpoint", "checkpoints")
    arguments = {
        name: orbax.ArrayRestoreArgs(
            sharding=leaf.sharding, global_shape=leaf.shape, dtype=leaf.dtype
        )
        for name, leaf in like.items()
    }
    args = orbax.args.PyTreeRestore(item=like, restore_args=arguments, partial_restore=True)
    with _reading(folder), quiet_orbax():
        arrays: dict[str, jax.Array] = _handler().restore(_epath(folder), args=args)
    return arrays


def read_packed(folder: Path) -> dict[str, bytes]:
    """Return what Orbax packed: of each array, one uncompressed chunk of zarr, which is all of it.

    Not read by Orbax, which takes ten times as long and reads missing chunks as zeros.
    """
    opened = require("tensorstore", "checkpoints").KvStore.open
    base = {"driver": "file", "path": f"{folder}/"}
    with _reading(folder):
        store = opened({"driver": "ocdbt", "base": base}).result()
        keys = [key for key in store.list().result() if not key.endswith(b"/.zarray")]
        reads = [store.read(key) for key in keys]
        values = [read.result().value for read in reads]
    return {key.decode().rpartition("/")[0]: each for key, each in zip(keys, values, strict=True)}


@contextlib.contextmanager
def quiet_orbax() -> Iterator[None]:
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


@contextlib.contextmanager
def _reading(folder: Path) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # tensorstore raises many types
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise CheckpointError(f"{folder} cannot be read: {lines[0]}") from error


def _begun(handler: Any, folder: Path, arrays: Mapping[str, Any]) -> Any:
    args = require("orbax.checkpoint", "checkpoints").args.PyTreeSave(dict(arrays))
    folder.mkdir(parents=True, exist_ok=True)
    return asyncio.run(handler.async_save(_epath(folder), args=args)) or ()


def _epath(folder: Path) -> Any:
    return require("etils.epath", "checkpoints").Path(folder)


def _handler(packed: bool = False) -> Any:
    # Not an Orbax checkpointer: its barriers time out if one process fails.
    orbax = require("orbax.checkpoint", "checkpoints")
    # By default each replica copies a slice of every replicated array, with a program compiled for
    # it. A save then stalls training 2.5 times as long on a CPU, and the first one for seconds.
    arrays = orbax.type_handlers.ArrayHandler(use_replica_parallel=False)
    hosted = orbax.type_handlers.NumpyHandler(deepcopy_host_arrays=False)
    types = orbax.type_handlers.create_type_handler_registry(
        (jax.Array, arrays), (np.ndarray, hosted)
    )
    return orbax.PyTreeCheckpointHandler(
        use_ocdbt=packed, use_zarr3=False, use_compression=False, type_handler_registry=types
    )
