"""Checkpoints as Orbax writes them, with manifests, for tests that damage them."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tensorstore
from jax.sharding import NamedSharding, PartitionSpec

from replicax.core.ground.train_state import TrainState
from replicax.train.checkpoints.arrays import ITEM, array_entries, begin_writing
from replicax.train.checkpoints.manifest import (
    ArrayEntry,
    FileEntry,
    Manifest,
    Position,
    file_entries,
    write_manifest,
)
from replicax.train.checkpoints.store import verify_checkpoint
from replicax.train.checkpoints.with_orbax import begin_orbax, finish_orbax, quiet_orbax, write_tree

DTYPES = ("float32", "bfloat16", "float16", "int32", "uint32", "int8", "bool", "float8_e4m3fn")
POSITION = Position(
    step=120,
    epoch=2,
    rows=640,
    evaluated_step=100,
    rows_trained=3840,
    rows_unrecorded=64,
    records=14,
    bad_steps=1,
)


def state_at(step: int) -> TrainState:
    return TrainState(jnp.int32(step), {"w": jnp.full(400, step * 1.5)}, (), {}, jnp.uint32(0))


def position_at(step: int) -> Position:
    return dataclasses.replace(POSITION, step=step)


def manifest(**changes: Any) -> Manifest:
    """Return a manifest of no existing checkpoint."""
    fields: dict[str, Any] = {
        "position": POSITION,
        "token": 3,
        "saved_at": 1763740800.25,
        "seed": 7,
        "arrays": {"params.w": ArrayEntry("float32", (3, 4)), "step": ArrayEntry("int32", ())},
        "files": {
            "default/params.w/0.0": FileEntry(48, ("0123456789abcdef" * 4,)),
            "default/step/0": FileEntry(2**26 + 1, ("ab" * 32, "cd" * 32)),
        },
        "config": {"learning_rate": 0.001, "layers": [1, 2], "name": "é\n", "none": None},
        "extra": {"replicax": "0.1.0", "nested": {"true": True}},
    }
    return Manifest(**{**fields, **changes})


def tree(devices: int = 2) -> dict[str, jax.Array]:
    """Some 45 kB in 13 arrays: of several dtypes, replicated and split, and two scalars."""
    mesh = jax.make_mesh((devices,), ("data",), devices=jax.devices()[:devices])
    random = np.random.default_rng(0)

    def placed(array: Any, *spec: str | None) -> jax.Array:
        return jax.device_put(array, NamedSharding(mesh, PartitionSpec(*spec)))

    arrays = {
        "step": placed(np.int32(120)),
        "seed": placed(np.uint32(7)),
        "params.dense.kernel": placed(random.normal(size=(64, 96)).astype(np.float32)),
        "opt_state.0.mu.dense.kernel": placed(random.normal(size=(32, 64)), None, "data"),
        "params.odd": placed(random.normal(size=(3, 5, 7)).astype(np.float32)),
    }
    for dtype in DTYPES:
        values = jnp.asarray(random.integers(0, 2, size=(16, 24)), dtype)
        arrays[f"params.{dtype}"] = placed(values, "data")
    return arrays


def save(folder: Path, arrays: Mapping[str, jax.Array]) -> Manifest:
    """Write a checkpoint of `arrays` into `folder`."""
    with quiet_orbax():
        futures = begin_orbax(folder / ITEM, arrays, packed=True)
        shapes = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in arrays.items()}
        write_tree(folder / ITEM, shapes, futures, packed=True)
    finish_orbax(folder / ITEM)
    return sealed(folder, arrays=entries(arrays))


def write(state: TrainState, folder: Path) -> TrainState:
    """Write a checkpoint of `state` into `folder`, and compare it with its description."""
    begin_writing(state, folder)()
    finish_orbax(folder / ITEM)
    verify_checkpoint(folder, sealed(folder, arrays=array_entries(state)))
    return state


def data_file(folder: Path) -> Path:
    """Return the largest file of a checkpoint, which has values of its arrays."""
    return max((folder / ITEM).glob("ocdbt.process_*/d/*"), key=lambda path: path.stat().st_size)


def chunks(folder: Path) -> Any:
    """Return the store of the chunks of a checkpoint's arrays, to damage it."""
    base = {"driver": "file", "path": f"{folder / ITEM}/"}
    return tensorstore.KvStore.open({"driver": "ocdbt", "base": base}).result()


def sealed(folder: Path, **changes: Any) -> Manifest:
    """Write a manifest that describes `folder` as it is."""
    described = manifest(**{"files": file_entries(folder), **changes})
    write_manifest(folder, described)
    return described


def entries(arrays: Mapping[str, jax.Array]) -> dict[str, ArrayEntry]:
    """Return name -> entry, as a resumed run needs them."""
    return {name: ArrayEntry(array.dtype.name, array.shape) for name, array in arrays.items()}
