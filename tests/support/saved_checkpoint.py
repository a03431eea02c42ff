"""Checkpoints as Orbax writes them, with manifests, for tests that damage them."""

import asyncio
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from jax.sharding import NamedSharding, PartitionSpec

from replicax.train.checkpoints.manifest import (
    ArrayEntry,
    FileEntry,
    Manifest,
    Position,
    file_entries,
    write_manifest,
)

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


def manifest(**changes: Any) -> Manifest:
    """Id of no existing checkpoint."""
    fields: dict[str, Any] = {
        "position": POSITION,
        "token": 3,
        "saved_at": 1763740800.25,
        "seed": 7,
        "arrays": {"params.w": ArrayEntry("float32", (3, 4)), "step": ArrayEntry("int32", ())},
        "files": {
            "state/params.w/0.0": FileEntry(48, ("0123456789abcdef" * 4,)),
            "state/step/0": FileEntry(2**26 + 1, ("ab" * 32, "cd" * 32)),
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
    logging.getLogger("absl").setLevel(logging.ERROR)
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=False, use_zarr3=False, use_compression=False)
    state = epath.Path(folder / "state")

    async def written() -> None:
        for future in await handler.async_save(state, args=ocp.args.PyTreeSave(arrays)) or ():
            future.result()

    asyncio.run(written())
    handler.finalize(state)
    return sealed(folder, arrays=entries(arrays))


def sealed(folder: Path, **changes: Any) -> Manifest:
    """Write a manifest that describes `folder` as it is."""
    described = manifest(**{"files": file_entries(folder), **changes})
    write_manifest(folder, described)
    return described


def entries(arrays: Mapping[str, jax.Array]) -> dict[str, ArrayEntry]:
    """Return name -> entry, as a resumed run needs them."""
    return {name: ArrayEntry(array.dtype.name, array.shape) for name, array in arrays.items()}
