"""Each device's copy of a step's results."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from replicax.core.ground.leaves import PyTree, is_random_key
from replicax.verify.difference import Leaves, leaves


@dataclasses.dataclass(frozen=True)
class Copies:
    """Results by path: one copy if all replicas hold the same bits, else one per replica."""

    held: Mapping[str, list[np.ndarray]]
    stacked: frozenset[str] = frozenset()
    """Paths of stacked leaves, [replicas, ...]."""

    @property
    def unequal(self) -> list[str]:
        """Paths where replicas hold different bits."""
        return [path for path, copies in self.held.items() if len(copies) > 1]

    def of(self, replica: int) -> Leaves:
        """Return the results of one replica."""
        return {path: copies[min(replica, len(copies) - 1)] for path, copies in self.held.items()}

    def bits(self) -> dict[str, bytes]:
        """Return the bits of every copy, for comparing two runs."""
        return {
            path: b"".join(each.tobytes() for each in copies) for path, copies in self.held.items()
        }


def read_copies(
    tree: PyTree, shapes: Mapping[str, tuple[int, ...]], *, stacked_over: int | None = None
) -> Copies:
    """Copy a tree of results to the host, from every device that holds a full copy.

    `shapes` are without the replica dimension of a step whose results are `stacked_over` replicas.
    """
    held: dict[str, list[np.ndarray]] = {}
    stacked: set[str] = set()
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        name = jax.tree_util.keystr(path)
        if stacked_over and getattr(leaf, "shape", ()) == (stacked_over, *shapes.get(name, ())):
            stacked.add(name)
            whole = leaves(leaf)[""]
            copies = [whole[replica] for replica in range(stacked_over)]
        else:
            copies = [value for part in _parts(leaf) if (value := leaves(part).get("")) is not None]
        if copies:
            bits = copies[0].tobytes()
            same = all(copy.tobytes() == bits for copy in copies[1:])
            held[name] = [copies[0].copy()] if same else [copy.copy() for copy in copies]
    return Copies(held, frozenset(stacked))


def _parts(leaf: Any) -> list[Any]:
    """Return each device's copy of a leaf, in mesh order; the leaf itself if it is sharded."""
    if not isinstance(leaf, jax.Array):
        return [leaf]
    if not leaf.is_fully_replicated:
        return [leaf] if is_random_key(leaf) else _copies_of_parts(leaf)
    by_device = {shard.device: shard.data for shard in leaf.addressable_shards}
    mesh = getattr(leaf.sharding, "mesh", None)
    if not isinstance(mesh, jax.sharding.Mesh):
        return [by_device[device] for device in sorted(by_device, key=lambda each: each.id)]
    return [by_device[device] for device in mesh.devices.flat if device in by_device]


def _copies_of_parts(leaf: jax.Array) -> list[Any]:
    """Return the copies of a leaf that is sharded over some devices, each assembled from shards."""
    copies = {
        shard.replica_id: np.empty(leaf.shape, leaf.dtype) for shard in leaf.addressable_shards
    }
    if len(copies) == 1:
        return [leaf]
    for shard in leaf.addressable_shards:
        copies[shard.replica_id][shard.index] = shard.data
    return list(copies.values())
