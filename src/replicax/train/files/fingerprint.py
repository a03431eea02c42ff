"""Checksum a state per leaf and device, and find unequal replicas.

A "replicated" array is a copy on every device, and JAX does not notice when the copies are no
longer equal. Here each device checksums its own copy.
"""

import collections
import dataclasses
import hashlib
import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from replicax.core.ground.leaves import PyTree, numbers, whole_on_host

_SPREAD = np.uint32(0x9E3779B1), np.uint32(0x85EBCA77)  # primes from xxHash


@dataclasses.dataclass(frozen=True)
class UnequalCopies:
    """A leaf, or a shard of one, whose replicas are not equal."""

    leaf: str
    """Path in the state: `params['w']`."""
    groups: tuple[tuple[int, ...], ...]
    """Mesh positions of devices, grouped by the bits they hold, largest group first."""

    @property
    def wrong(self) -> tuple[int, ...] | None:
        """The devices outvoted by a majority; None if no group has more than half."""
        first, *others = self.groups
        if 2 * len(first) <= sum(map(len, self.groups)):
            return None
        return tuple(sorted(place for group in others for place in group))


class Fingerprint:
    """Fingerprints successive states with the same shapes and shardings.

    A change within 4 bytes of a leaf, such as any single bit flip, always changes its fingerprint.
    Any other change is missed with probability 2**-64, or 2**-32 if it is as regular as the same
    bit flipped twice.
    """

    def __init__(self, state: PyTree) -> None:
        paths, leaves = zip(*jax.tree_util.tree_leaves_with_path(state), strict=True)
        self.mesh: Mesh = leaves[0].sharding.mesh
        self.leaves = tuple(jax.tree_util.keystr(path).lstrip(".") for path in paths)
        self._specs = tuple(leaf.sharding.spec for leaf in leaves)
        self._alike = [_alike(leaf) for leaf in leaves]
        self.compared: list[str] = []
        """The leaves that are on more than one device."""
        self.compared_bytes = self.alone_bytes = 0
        """Bytes per device that are replicated, and that are on that device only."""
        self.leaf_bytes: dict[str, int] = {}
        """Bytes of each leaf on a device."""
        for name, leaf, alike in zip(self.leaves, leaves, self._alike, strict=True):
            size = leaf.dtype.itemsize * math.prod(leaf.sharding.shard_shape(leaf.shape))
            self.leaf_bytes[name] = size
            if len(alike[0]) > 1:
                self.compared.append(name)
                self.compared_bytes += size
            else:
                self.alone_bytes += size

    def take(self, state: PyTree) -> jax.Array:
        """Fingerprint `state` on the devices, without waiting: uint32 `[devices, leaves, 3]`.

        Two checksums, and whether any value is not finite; every device gets the whole table.
        """
        table: jax.Array = of_each_device(_sums, self.mesh, self._specs)(jax.tree.leaves(state))
        return table

    def differences(self, table: jax.Array) -> list[UnequalCopies]:
        """Return the copies that should be equal but are not; the same on all processes."""
        checksums = np.asarray(table.addressable_data(0))
        if (checksums == checksums[:1]).all():
            return []
        unequal = []
        for column, (leaf, alike) in enumerate(zip(self.leaves, self._alike, strict=True)):
            for places in alike:
                groups: dict[bytes, list[int]] = collections.defaultdict(list)
                for place in places:
                    groups[checksums[place, column].tobytes()].append(place)
                if len(groups) > 1:
                    ordered = sorted(groups.values(), key=lambda group: (-len(group), group))
                    unequal.append(UnequalCopies(leaf, tuple(map(tuple, ordered))))
        return unequal

    def not_finite(self, table: jax.Array) -> tuple[str, ...]:
        """Return the leaves with non-finite values on the first device."""
        first = np.asarray(table.addressable_data(0))[0]
        return tuple(leaf for leaf, row in zip(self.leaves, first, strict=True) if row[-1])

    def gather(self, state: PyTree, leaf: str) -> np.ndarray:
        """Return every device's copy of `leaf`: `[devices, ...]`, in the dtype of its words.

        It takes that much memory on every device: use it for suspect leaves only.
        """
        one = slice(number := self.leaves.index(leaf), number + 1)
        copies = of_each_device(_first, self.mesh, self._specs[one])(jax.tree.leaves(state)[one])
        return np.asarray(copies.addressable_data(0))


def fingerprint(array: jax.Array) -> jax.Array:
    """Return two uint32 checksums of all bits of `array`; traceable."""
    words = _words(array).ravel()
    places = lax.iota(jnp.uint32, words.size)
    # Odd multipliers make each term a bijection of its word, and as they depend on the position,
    # swaps are detected. The words are folded first, as their top bits would only meet the
    # multipliers' lowest bit, which is always set.
    first = (words ^ (words >> 16)) * _multipliers(places, _SPREAD[0])
    words = words * _SPREAD[1]
    second = (words ^ (words >> 15)) * _multipliers(places, _SPREAD[1])
    return jnp.stack([jnp.sum(terms, dtype=jnp.uint32) for terms in (first, second)])


def _multipliers(places: jax.Array, spread: np.uint32) -> jax.Array:
    """Return an odd number for each position, very different from its neighbours'."""
    scattered = places * spread
    odd: jax.Array = (scattered ^ (scattered >> 15)) | 1
    return odd


def _not_finite(array: jax.Array) -> jax.Array:
    if not jnp.issubdtype(array.dtype, jnp.inexact):
        return jnp.zeros((), jnp.uint32)
    flag: jax.Array = (~jnp.isfinite(array)).any().astype(jnp.uint32)
    return flag


def _words(array: jax.Array) -> jax.Array:
    array = numbers(array)
    if jnp.issubdtype(array.dtype, jnp.complexfloating):
        array = jnp.stack([array.real, array.imag])
    if array.dtype == jnp.bool_:
        array = array.astype(jnp.uint8)
    if array.dtype.name in ("int4", "uint4", "int2", "uint2"):
        array = array.astype(jnp.int8)
    bits = 8 * min(array.dtype.itemsize, 4)
    words: jax.Array = lax.bitcast_convert_type(array, jnp.dtype(f"uint{bits}"))
    wide: jax.Array = words.astype(jnp.uint32)
    return wide


def _sums(leaves: Sequence[jax.Array]) -> jax.Array:
    return jnp.stack([jnp.append(fingerprint(leaf), _not_finite(leaf)) for leaf in leaves])


def _first(leaves: Sequence[jax.Array]) -> Any:
    return numbers(leaves[0])


@lru_cache(maxsize=32)
def of_each_device(
    function: Callable[[Sequence[jax.Array]], Any],
    mesh: Mesh,
    specs: tuple[PartitionSpec, ...],
) -> Any:
    """Return a function that gathers `function` of each device's local leaves on all devices."""

    def gathered(leaves: list[jax.Array]) -> jax.Array:
        everybodys: jax.Array = lax.all_gather(function(leaves), mesh.axis_names)
        return everybodys

    # JAX assumes that the copies are equal. With explicit shardings no data is moved; if a device
    # received another's copy, a fault in its own would be hidden.
    mapped = jax.shard_map(
        gathered, mesh=mesh, in_specs=(list(specs),), out_specs=PartitionSpec(), check_vma=False
    )
    return jax.jit(mapped, in_shardings=([NamedSharding(mesh, spec) for spec in specs],))


def _alike(leaf: Any) -> list[list[int]]:
    """Return mesh positions grouped by the part of `leaf` they hold."""
    parts = leaf.sharding.devices_indices_map(leaf.shape)
    places: dict[str, list[int]] = collections.defaultdict(list)
    for place, device in enumerate(leaf.sharding.mesh.devices.flat):
        places[str(parts[device])].append(place)
    return list(places.values())


def sha256(data: PyTree) -> str:
    """Return the SHA-256, in hex, of the path, dtype, shape and bits of each array in `data`."""
    digest = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_leaves_with_path(data):
        array = np.ascontiguousarray(whole_on_host(numbers(leaf)))
        digest.update(f"{jax.tree_util.keystr(path)} {array.dtype}{array.shape}".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()
