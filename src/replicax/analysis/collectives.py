"""Collectives: who takes part in them, and what each device sends."""

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import numpy as np

_LISTED = re.compile(r"replica_groups=\{\{([\d,]+)\}")
_COUNTED = re.compile(r"replica_groups=\[\d+,(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_MESH = re.compile(
    r"replica_groups=mesh\[([^\]]*)\]"
    r"(?:,\s*device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))?\s*\{([^}]*)\}"
)
_AXIS = re.compile(r"'([^']+)'(?::\((\d+)\)|=)?(\d*)")
_PAIRS = re.compile(r"source_target_pairs=\{([\d,{}]*)\}")
_PAIR = re.compile(r"\{(\d+),(\d+)\}")


def first_group(attributes: str) -> tuple[int, ...] | None:
    """Return the devices of a collective's first group, by their numbers in the program.

    `attributes` are those of its instruction. None where all take part together. What a
    `collective-permute` joins, in however many hops, is one group.
    """
    if pairs := _PAIRS.search(attributes):
        return _joined([(int(one), int(other)) for one, other in _PAIR.findall(pairs[1])])
    if listed := _LISTED.search(attributes):
        return _integers(listed[1])
    if counted := _COUNTED.search(attributes):
        return _counted(int(counted[1]), _integers(counted[2]), counted[3])
    if mesh := _MESH.search(attributes):
        return _along(mesh[1], mesh[2], mesh[3], mesh[4])
    return None


def axes_of_group(
    group: tuple[int, ...] | None, sizes: Mapping[str, int]
) -> tuple[str, ...] | None:
    """Return the axes of a mesh that a group of devices spans; None where it is all of them.

    Args:
        group: see `first_group`.
        sizes: of the mesh that the program was compiled for, by axis, in the mesh's order.
    """
    if group is None or len(group) == math.prod(sizes.values()):
        return None
    places = np.unravel_index(list(group), tuple(sizes.values()))
    return tuple(axis for axis, at in zip(sizes, places, strict=True) if len(set(at.tolist())) > 1)


def _integers(text: str) -> tuple[int, ...]:
    return tuple(int(each) for each in text.split(","))


def _joined(pairs: list[tuple[int, int]]) -> tuple[int, ...]:
    """Everyone whom the first sender reaches, or is reached from."""
    found = set(pairs[0]) if pairs else set()
    while more := {each for pair in pairs if found & set(pair) for each in pair} - found:
        found |= more
    return tuple(sorted(found))


def _counted(size: int, dims: tuple[int, ...], order: str | None) -> tuple[int, ...]:
    """The first of the groups `[groups,size]<=[dims]T(order)`."""
    return tuple(_in_order(dims, order).reshape(-1, size)[0].tolist())


def _in_order(dims: tuple[int, ...], order: str | None) -> np.ndarray:
    devices = np.arange(math.prod(dims)).reshape(dims)
    return devices if order is None else devices.transpose(_integers(order))


def _along(mesh: str, dims: str | None, order: str | None, axes: str) -> tuple[int, ...]:
    """The first group along axes of a mesh, or along a part of one: `'a':(2)4`, 4 after 2.

    `dims` and `order` tell in which order the mesh has its devices, where they are not in turn.
    """
    sizes = {axis: int(size) for axis, _, size in _AXIS.findall(mesh)}
    at = {axis: [0] for axis in sizes}
    for axis, before, part in _AXIS.findall(axes):
        count = int(part or sizes[axis])
        stride = sizes[axis] // (int(before or 1) * count)
        at[axis] = [number * stride for number in range(count)]
    shape = tuple(sizes.values())
    devices = _in_order(_integers(dims) if dims else shape, order).reshape(shape)
    return tuple(devices[np.ix_(*at.values())].reshape(-1).tolist())


SLIGHTLY = 1.02
"""Times the lower bound: what is above it is worth a word."""
_SUM_BYTES = 8
"""Bytes of a metric's total and weight."""
_WIDE = 4
"""Bytes of an element of a gradient's sum, at least."""


class Sent(Protocol):
    """Result bytes of collectives of one kind, on one device."""

    @property
    def kind(self) -> str:
        """Kind, as in `analysis.compiled.COLLECTIVES`."""
        ...

    @property
    def bytes(self) -> int:
        """Bytes of the results."""
        ...


def sums_bytes(params: Iterable[Any], metrics: int, sent: Any = None) -> int:
    """Return the bytes of the sums of gradient, loss and metrics, as they are sent.

    Args:
        params: the leaves of the parameters that are trained, or their shapes.
        metrics: how many means are reduced, the loss among them.
        sent: the dtype that a reduction rounds the gradient to; None sends it in its own, float32
            or wider.
    """
    dtype = None if sent is None else np.dtype(sent)
    gradient: int = sum(
        math.prod(leaf.shape) * _element_bytes(leaf.dtype, dtype) for leaf in params
    )
    return gradient + _SUM_BYTES * metrics


def _element_bytes(own: np.dtype[Any], sent: np.dtype[Any] | None) -> int:
    if sent is None:
        return max(_WIDE, own.itemsize)
    return sent.itemsize * (2 if own.kind == "c" else 1)


def wire_bytes_of_all_reduce(size: float, devices: int) -> float:
    """Bytes that each device sends to reduce `size` bytes, at least."""
    return 2 * size * (devices - 1) / devices


def wire_bytes(sent: Sent, devices: int) -> float:
    """Bytes that each device sends, in a ring."""
    share = (devices - 1) / devices
    factor = {
        "all-reduce": 2 * share,
        "all-gather": share,
        "reduce-scatter": devices - 1,
        "all-to-all": share,
    }
    return sent.bytes * factor.get(sent.kind, 1.0)
