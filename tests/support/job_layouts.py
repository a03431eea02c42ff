"""Trains with the layouts below; process 0 of a job writes the results to `PATH`."""

import sys
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from support.agreement import How, Trained, on
from support.cases import CASES, TOWER, Case

import replicax as rx

WEIGHTED = CASES["weighted"]
TRAINED: dict[str, tuple[Case, How]] = {
    "zero1": (WEIGHTED, on("jit", "zero1", data=8)),
    "zero1 in shard_map": (WEIGHTED, on("shard_map", "zero1", data=8, accumulate=4)),
    "zero1 in exact": (WEIGHTED, on("exact", "zero1", data=8)),
    "fsdp": (WEIGHTED, on("jit", "fsdp", data=8)),
    "fsdp in shard_map": (TOWER, on("shard_map", "fsdp", data=8)),
    "hybrid": (WEIGHTED, on("shard_map", "fsdp", data=2, fsdp=4, accumulate=4)),
    "rules": (TOWER, on("jit", data=4, model=2)),
    "stages": (TOWER, on("jit", data=2, model=2, stage=2, accumulate=4)),
    "hybrid and rules": (TOWER, on("jit", "fsdp", data=2, fsdp=2, model=2)),
}
"""Cases, and how they are trained on 8 devices."""
PARTS = ("first", "last", "gradient", "params", "extras", "evaluated")


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
    for name, (case, how) in TRAINED.items():
        found[name] = {
            "trained": Trained(case, how, job).parts(*PARTS),
            "inside": axes_inside(rx.make_mesh(**dict(how.axes))),
        }
    if jax.process_index() == 0:
        np.savez(path, **flat(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
