"""What a step sends between devices: bytes of its sums, and on the wire."""

import math
from collections.abc import Iterable
from typing import Any, Protocol

import numpy as np

SLIGHTLY = 1.02
"""Times the lower bound: what is above it is worth a word."""
_SUM_BYTES = 8
"""Of a metric's total and weight."""
_WIDE = 4
"""Bytes of an element of a gradient's sum, at least."""


class Sent(Protocol):
    """Result bytes of collectives of one kind, on one device."""

    @property
    def kind(self) -> str:
        """As `analysis.compiled.COLLECTIVES` spell it."""
        ...

    @property
    def bytes(self) -> int:
        """Of the results."""
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
