"""Bits of a state -> a number a leaf and device, and where devices differ that must be equal.

A "replicated" array is a copy on every device, and nothing in JAX notices when the copies are no
longer equal. Here each device sums up its own.
"""

import collections
import dataclasses
import hashlib
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from replicax.core.leaves import numbers
from replicax.core.models.definition import PyTree

_SPREAD = np.uint32(0x9E3779B1), np.uint32(0x85EBCA77)  # primes, as xxHash has them


@dataclasses.dataclass(frozen=True)
class Difference:
    """A leaf, or the part of it that some devices hold alike, whose copies are not equal."""

    leaf: str
    """Path in the state: `params['w']`."""
    groups: tuple[tuple[int, ...], ...]
    """Places of devices in the mesh by what they hold, the largest group first."""

    @property
    def wrong(self) -> tuple[int, ...] | None:
        """The devices that most others outvote; None where no group has more than half."""
        first, *others = self.groups
        if 2 * len(first) <= sum(map(len, self.groups)):
            return None
        return tuple(sorted(place for group in others for place in group))


class Fingerprint:
    """The fingerprints of one state after the other, all of the same shapes and shardings.

    A change within 4 bytes of a leaf, any one bit's say, changes its fingerprint for certain;
    another goes unseen once in 2**64 times, or where it is as regular as the same bit flipped
    twice, once in 2**32.

    Args:
        state: arrays or shapes, each leaf with a `NamedSharding` on one mesh.
    """

    def __init__(self, state: PyTree) -> None:
        paths, leaves = zip(*jax.tree_util.tree_leaves_with_path(state), strict=True)
        shardings: list[NamedSharding] = [leaf.sharding for leaf in leaves]
        self.mesh: Mesh = shardings[0].mesh  # type: ignore[assignment]
        self.leaves = tuple(jax.tree_util.keystr(path).lstrip(".") for path in paths)
        self._specs = tuple(sharding.spec for sharding in shardings)
        self._alike = [_alike(self.mesh, spec) for spec in self._specs]
        self._bytes = [
            _bytes(leaf.dtype) * int(np.prod(sharding.shard_shape(leaf.shape)))
            for leaf, sharding in zip(leaves, shardings, strict=True)
        ]

    @property
    def compared(self) -> tuple[str, ...]:
        """The leaves that more than one device holds."""
        pairs = zip(self.leaves, self._alike, strict=True)
        return tuple(leaf for leaf, alike in pairs if len(alike[0]) > 1)

    @property
    def compared_bytes(self) -> int:
        """Bytes of a device that another holds too."""
        return sum(size for size, alike in self._sized if len(alike[0]) > 1)

    @property
    def alone_bytes(self) -> int:
        """Bytes of a device that no other holds, so that nothing can be compared with them."""
        return sum(size for size, alike in self._sized if len(alike[0]) == 1)

    @property
    def _sized(self) -> zip:  # type: ignore[type-arg]
        return zip(self._bytes, self._alike, strict=True)

    def take(self, state: PyTree) -> jax.Array:
        """Fingerprint `state` on the devices, without waiting for it.

        Returns:
            uint32 `[devices, leaves, 3]`, whole on every device: two sums of the bits, and whether
            some number is not finite.
        """
        table: jax.Array = _program(self.mesh, self._specs)(jax.tree.leaves(state))
        return table

    def differences(self, table: jax.Array) -> list[Difference]:
        """What is not equal and should be; all processes learn the same."""
        numbers = np.asarray(table.addressable_data(0))
        if (numbers == numbers[:1]).all():
            return []
        found = []
        for column, (leaf, alike) in enumerate(zip(self.leaves, self._alike, strict=True)):
            for places in alike:
                groups: dict[bytes, list[int]] = collections.defaultdict(list)
                for place in places:
                    groups[numbers[place, column].tobytes()].append(place)
                if len(groups) > 1:
                    ordered = sorted(groups.values(), key=lambda group: (-len(group), group))
                    found.append(Difference(leaf, tuple(map(tuple, ordered))))
        return found

    def not_finite(self, table: jax.Array) -> tuple[str, ...]:
        """The leaves that have a number which is not finite, on the first device."""
        first = np.asarray(table.addressable_data(0))[0]
        return tuple(leaf for leaf, row in zip(self.leaves, first, strict=True) if row[-1])

    def gather(self, state: PyTree, leaf: str) -> np.ndarray:
        """What every device holds of `leaf`: `[devices, ...]`, of the dtype of its words.

        It takes that much memory on every device, so it is for the one leaf that is in question.
        """
        column = self.leaves.index(leaf)
        spec = self._specs[column]
        copies: jax.Array = _copies(self.mesh, spec)(jax.tree.leaves(state)[column])
        return np.asarray(copies.addressable_data(0))


def fingerprint(array: jax.Array) -> jax.Array:
    """Two uint32s of all bits of `array`, traced."""
    words = _words(array).ravel()
    places = lax.iota(jnp.uint32, words.size)
    # An odd multiplier makes each term a bijection of its word; that it depends on the place makes
    # a swap visible. Bits at the top would meet only the multipliers' last bit, which all have: so
    # the words are folded first.
    first = (words ^ (words >> 16)) * _multipliers(places, _SPREAD[0])
    words = words * _SPREAD[1]
    second = (words ^ (words >> 15)) * _multipliers(places, _SPREAD[1])
    return jnp.stack([jnp.sum(terms, dtype=jnp.uint32) for terms in (first, second)])


def _multipliers(places: jax.Array, spread: np.uint32) -> jax.Array:
    """An odd number for each place, far from its neighbours'."""
    scattered = places * spread
    odd: jax.Array = (scattered ^ (scattered >> 15)) | 1
    return odd


def _not_finite(array: jax.Array) -> jax.Array:
    """A uint32: 1 where some element is not finite."""
    if not jnp.issubdtype(array.dtype, jnp.inexact):
        return jnp.zeros((), jnp.uint32)
    found: jax.Array = (~jnp.isfinite(array)).any().astype(jnp.uint32)
    return found


def _words(array: jax.Array) -> jax.Array:
    """The bits of `array` as uint32s."""
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        array = jax.random.key_data(array)
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


@lru_cache(maxsize=16)
def _program(mesh: Mesh, specs: tuple[PartitionSpec, ...]) -> Any:
    def table(leaves: list[jax.Array]) -> jax.Array:
        own = jnp.stack([jnp.append(fingerprint(leaf), _not_finite(leaf)) for leaf in leaves])
        everybodys: jax.Array = lax.all_gather(own, mesh.axis_names)
        return everybodys

    return _on_every_device(table, mesh, list(specs))


@lru_cache(maxsize=16)
def _copies(mesh: Mesh, spec: PartitionSpec) -> Any:
    def copies(leaf: jax.Array) -> jax.Array:
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        everybodys: jax.Array = lax.all_gather(leaf, mesh.axis_names)
        return everybodys

    return _on_every_device(copies, mesh, spec)


def _on_every_device(function: Any, mesh: Mesh, specs: Any) -> Any:
    """`function` of each device's own part, where JAX believes that the copies are equal."""
    # In shardings that are told, nothing is moved: a device that were sent another's copy would
    # hide what is wrong with its own.
    mapped = jax.shard_map(
        function, mesh=mesh, in_specs=(specs,), out_specs=PartitionSpec(), check_vma=False
    )
    place = partial(NamedSharding, mesh)
    is_spec = {"is_leaf": lambda each: isinstance(each, PartitionSpec)}
    return jax.jit(mapped, in_shardings=(jax.tree.map(place, specs, **is_spec),))


def _alike(mesh: Mesh, spec: PartitionSpec) -> list[list[int]]:
    """Places in the mesh by which part of an array with `spec` they hold."""
    split = {axis for axes in spec if axes for axis in ([axes] if isinstance(axes, str) else axes)}
    kept = [number for number, axis in enumerate(mesh.axis_names) if axis in split]
    parts: dict[tuple[int, ...], list[int]] = collections.defaultdict(list)
    for place, where in enumerate(np.ndindex(*mesh.devices.shape)):
        parts[tuple(where[number] for number in kept)].append(place)
    return list(parts.values())


def _bytes(dtype: Any) -> int:
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return (
            int(np.prod(jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct((), dtype)).shape))
            * 4
        )
    return int(dtype.itemsize)


def sha256(data: PyTree) -> str:
    """Return the SHA-256, in hex, of the path, dtype, shape and bits of each array in `data`."""
    digest = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_leaves_with_path(data):
        array = np.ascontiguousarray(numbers(leaf))
        digest.update(f"{jax.tree_util.keystr(path)} {array.dtype}{array.shape}".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()
