"""Collectives: their device groups and the bytes that each device sends."""

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
    """Return the devices of a collective's first group, by their indices in the program.

    `attributes` are those of its instruction. The result is None if all devices form one group.
    Devices connected by a `collective-permute`, over any number of hops, form one group.
    """
    if pairs := _PAIRS.search(attributes):
        return _joined([(int(one), int(other)) for one, other in _PAIR.findall(pairs[1])])
    if listed := _LISTED.search(attributes):
        return _integers(listed[1])
    if counted := _COUNTED.search(attributes):
        devices = _in_order(_integers(counted[2]), counted[3])  # [groups,size]<=[dims]T(order)
        return tuple(devices.reshape(-1, int(counted[1]))[0].tolist())
    if mesh := _MESH.search(attributes):
        return _along(mesh[1], mesh[2], mesh[3], mesh[4])
    return None


def axes_of_group(
    group: tuple[int, ...] | None, sizes: Mapping[str, int]
) -> tuple[str, ...] | None:
    """Return the axes that a group of devices spans in a mesh of these sizes; None for all."""
    if group is None or len(group) == math.prod(sizes.values()):
        return None
    places = np.unravel_index(list(group), tuple(sizes.values()))
    return tuple(axis for axis, at in zip(sizes, places, strict=True) if len(set(at.tolist())) > 1)


def _integers(text: str) -> tuple[int, ...]:
    return tuple(int(each) for each in text.split(","))


def _joined(pairs: list[tuple[int, int]]) -> tuple[int, ...]:
    """Return all devices connected to the first sender."""
    group = set(pairs[0]) if pairs else set()
    while more := {device for pair in pairs if group & set(pair) for device in pair} - group:
        group |= more
    return tuple(sorted(group))


def _in_order(dims: tuple[int, ...], order: str | None) -> np.ndarray:
    devices = np.arange(math.prod(dims)).reshape(dims)
    return devices if order is None else devices.transpose(_integers(order))


def _along(mesh: str, dims: str | None, order: str | None, axes: str) -> tuple[int, ...]:
    """Return the first group along mesh axes, or along part of one: `'a':(2)4`, 4 after 2.

    `dims` and `order` give the mesh's device order if it is not sequential.
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
"""Ratio to the lower bound above which traffic is reported."""
_SUM_BYTES, _DIVISOR_BYTES = 8, 4
"""Bytes of a metric's total and weight, and of what the gradient is divided by."""
_WIDE = 4
"""Minimum bytes per element of a gradient's sum."""


class _Sent(Protocol):
    """Result bytes of collectives of one kind, on one device."""

    @property
    def kind(self) -> str:
        """Kind, as in `analysis.compiled.COLLECTIVES`."""
        ...

    @property
    def bytes(self) -> int: ...


def sums_bytes(
    params: Iterable[Any], metrics: int, reduction: Any = None, replicas: int = 1
) -> int:
    """Return the bytes of the gradient, loss and metric sums as sent.

    `params` are the leaves of the trained parameters or their shapes, and `metrics` is the number
    of reduced metrics, including the loss, or 0 for the gradient alone. A `reduction` over
    `replicas` may have a `dtype` that it rounds the gradient to, or `payload_bytes`; otherwise it
    sends float32 or wider.
    """
    others = _SUM_BYTES * metrics + (_DIVISOR_BYTES if metrics else 0)
    if hasattr(reduction, "payload_bytes"):
        return int(reduction.payload_bytes(params, replicas)) + others
    sent = getattr(reduction, "dtype", None)

    def element_bytes(dtype: np.dtype[Any]) -> int:
        if sent is None:
            return max(_WIDE, dtype.itemsize)
        return int(np.dtype(sent).itemsize) * (2 if dtype.kind == "c" else 1)

    gradient: int = sum(math.prod(leaf.shape) * element_bytes(leaf.dtype) for leaf in params)
    return gradient + others


def wire_bytes_of_all_reduce(size: float, devices: int) -> float:
    """Return the minimum bytes that each device sends to all-reduce `size` bytes."""
    return 2 * size * (devices - 1) / devices


def wire_bytes(sent: _Sent, devices: int) -> float:
    """Return the bytes that each device sends in a ring."""
    share = (devices - 1) / devices
    factor = {
        "all-reduce": 2 * share,
        "all-gather": share,
        "reduce-scatter": devices - 1,
        "all-to-all": share,
    }
    return sent.bytes * factor.get(sent.kind, 1.0)
