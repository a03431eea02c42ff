"""Trains with the layouts below; process 0 of a job writes the results to `PATH`."""

import sys
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from support.layout_cases import Setup, on, train

import replicax as rx

CASES: dict[str, tuple[str, Setup, int]] = {
    "zero1": ("weighted", on("jit", "zero1", data=8), 1),
    "zero1 in shard_map": ("weighted", on("shard_map", "zero1", data=8), 4),
    "zero1 in exact": ("weighted", on("exact", "zero1", data=8), 1),
    "fsdp": ("weighted", on("jit", "fsdp", data=8), 1),
    "fsdp in shard_map": ("tower", on("shard_map", "fsdp", data=8), 1),
    "hybrid": ("weighted", on("shard_map", "fsdp", data=2, fsdp=4), 4),
    "rules": ("tower", on("jit", "replicated", data=4, model=2), 1),
    "stages": ("tower", on("jit", "replicated", data=2, model=2, stage=2), 4),
    "hybrid and rules": ("tower", on("jit", "fsdp", data=2, fsdp=2, model=2), 1),
}
"""Model, setup on 8 devices, and micro-batches."""


def axes_inside(mesh: Mesh) -> list[str]:
    """Return the axes of several devices along which all are of one process."""
    process = np.vectorize(lambda device: device.process_index)(mesh.devices)
    return [
        name
        for number, name in enumerate(mesh.axis_names)
        if mesh.shape[name] > 1 and (process == np.take(process, [0], axis=number)).all()
    ]


def flat(tree: Any) -> dict[str, np.ndarray]:
    """Return the leaves of a tree, by path."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}


def main(path: str) -> None:
    """Run as one process of a job."""
    job = rx.initialize(verbose=False)
    found: dict[str, Any] = {}
    for name, case in CASES.items():
        found[name] = {
            "trained": train(*case, job=job),
            "inside": axes_inside(rx.make_mesh(**dict(case[1].axes))),
        }
    if jax.process_index() == 0:
        np.savez(path, **flat(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
