"""Arrays written and read by Orbax: uncompressed, without barriers, and silent."""

import asyncio
import collections
import concurrent.futures
import contextlib
import inspect
import json
import logging
import math
import time
from collections.abc import Coroutine, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from replicax.core.ground.leaves import PyTree
from replicax.errors import CheckpointError, require
from replicax.train.files.places import write_whole

_HANDLER = "orbax.checkpoint._src.handlers.standard_checkpoint_handler.StandardCheckpointHandler"


def begin_orbax(folder: Path, arrays: Mapping[str, jax.Array], *, packed: bool) -> Any:
    """Copy `arrays` and begin to write them into `folder`; return Orbax's futures.

    All processes share a `packed` folder, of few files; else each array has a folder of its own.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if not arrays:
        return []
    # By default each replica copies a slice of every replicated array, with a program compiled for
    # it. A save then stalls training 2.5 times as long on a CPU, and the first one for seconds.
    handler = _types().ArrayHandler(use_replica_parallel=False)
    return _run(handler.serialize([*arrays.values()], _places(folder, arrays, packed)))


def write_tree(folder: Path, tree: PyTree, futures: Sequence[Any], *, packed: bool) -> None:
    """Write the NumPy arrays of `tree`, and wait for `futures`, of which it has the shapes.

    Process 0 writes them, and the tree's structure.
    """
    errors = []
    for future in futures:  # all of them, so that no write continues
        try:
            future.result()
        except Exception as error:
            errors.append(error)
    if errors:
        raise errors[0]
    args = require("orbax.checkpoint", "checkpoints").args.PyTreeSave(tree)
    for future in _run(_handler(packed).async_save(_epath(folder), args=args)):
        future.result()


def finish_orbax(folder: Path) -> None:
    """Make `folder`, which all processes have written, an item of a step that Orbax finds."""
    with quiet_orbax():
        _handler().finalize(_epath(folder))
    now = time.time_ns()
    about: dict[str, Any] = {"item_handlers": {folder.name: _HANDLER}, "custom_metadata": {}}
    about |= {"init_timestamp_nsecs": now, "commit_timestamp_nsecs": now}
    about |= {"metrics": {}, "performance_metrics": {}}
    write_whole(folder.parent / "_CHECKPOINT_METADATA", json.dumps(about).encode())


def read_arrays(folder: Path, like: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
    """Return arrays by the names that Orbax gave them, as `like`: each process its own shards."""
    if not like:
        return {}
    infos = _places(folder, like, is_packed(folder))
    arguments = [
        _types().ArrayRestoreArgs(sharding=leaf.sharding, global_shape=leaf.shape, dtype=leaf.dtype)
        for leaf in like.values()
    ]
    with _reading(folder), quiet_orbax():
        arrays = _run(_types().ArrayHandler().deserialize(infos, arguments))
    return dict(zip(like, arrays, strict=True))


def read_whole(folder: Path, like: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, bytes]:
    """Return the contents of those arrays in a packed `folder` that are one chunk.

    Not read by Orbax, which takes five times as long for thousands of small arrays.
    """
    with _reading(folder):
        store = _store(folder)
        chunks = _chunks(store)
        reads = {name: store.read(chunks[name][0]) for name in like if len(chunks[name]) == 1}
        values = {name: read.result().value for name, read in reads.items()}
    return {
        name: value
        for name, value in values.items()
        if len(value) == math.prod(like[name].shape) * np.dtype(like[name].dtype).itemsize
    }


def missing_chunks(folder: Path, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[str]:
    """Yield what is wrong with arrays of these shapes, by their names in `folder`.

    Orbax would read chunks that are missing as zeros.
    """
    with _reading(folder):
        store = _store(folder)
        chunks = _chunks(store)
        heads = {name: store.read(f"{name}/.zarray") for name in shapes}
        headers = {name: head.result().value for name, head in heads.items()}
    for name, shape in shapes.items():
        if not headers[name]:
            yield f"{name} is not there"
            continue
        head = json.loads(headers[name])
        parts = zip(shape, head["chunks"], strict=False)
        count = math.prod(-(-size // part) for size, part in parts)
        if tuple(head["shape"]) != shape:
            yield f"{name} has shape {head['shape']}, but {list(shape)} is needed"
        elif len(chunks[name]) != count:
            yield f"{name} has {len(chunks[name])} chunks, but {count} are needed"


def is_packed(folder: Path) -> bool:
    """Whether the arrays in `folder` share files (OCDBT)."""
    return (folder / "manifest.ocdbt").exists()


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


def _store(folder: Path) -> Any:
    """Open the keys and values that zarr has in `folder`."""
    base: dict[str, Any] = {"driver": "file", "path": f"{folder}/"}
    spec = {"driver": "ocdbt", "base": base} if is_packed(folder) else base
    return require("tensorstore", "checkpoints").KvStore.open(spec).result()


def _chunks(store: Any) -> dict[str, list[str]]:
    keys: dict[str, list[str]] = collections.defaultdict(list)
    for key in store.list().result():
        name, _, chunk = key.decode().rpartition("/")
        if name and chunk != ".zarray":
            keys[name].append(key.decode())
    return keys


def _run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Run it in another thread, as that of a notebook has an event loop."""
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, coroutine).result()


def _epath(folder: Path) -> Any:
    return require("etils.epath", "checkpoints").Path(folder)


def _types() -> Any:
    return require("orbax.checkpoint", "checkpoints").type_handlers


def _places(folder: Path, names: Iterable[str], packed: bool) -> list[Any]:
    """Return how Orbax writes or reads the arrays of these names in `folder`."""
    context = _types().get_ts_context(use_ocdbt=packed)
    where = {"parent_dir": _epath(folder), "is_ocdbt_checkpoint": packed, "ts_context": context}
    where |= {"use_compression": False, "use_zarr3": False}
    return [_types().ParamInfo(name=name, **where) for name in names]


def _handler(packed: bool = True) -> Any:
    # Not an Orbax checkpointer: its barriers time out if one process fails.
    types = _types()

    class Begun(types.ArrayHandler):  # type: ignore[misc, name-defined]
        async def serialize(self, *_: Any, **__: Any) -> list[Any]:
            return []

    hosted = types.NumpyHandler(deepcopy_host_arrays=False)
    registry = types.create_type_handler_registry(
        (jax.ShapeDtypeStruct, Begun()), (np.ndarray, hosted)
    )
    return require("orbax.checkpoint", "checkpoints").PyTreeCheckpointHandler(
        use_ocdbt=packed, use_zarr3=False, use_compression=False, type_handler_registry=registry
    )
