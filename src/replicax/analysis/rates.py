"""Rates that a chip has reached, by shape, as `make gpu` measured them one kernel at a time."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from replicax.analysis.schedule import Kernel

_ALIGNED = 8
"""Elements of 16 bits, to a multiple of which rows of a fast product are aligned: 16 bytes."""


@dataclass(frozen=True)
class MeasuredRates:
    """Rates of one chip; a kernel that is like none of those measured has no rate."""

    source: str
    """The device, the date and the versions."""
    bytes_per_second: float
    """Memory bandwidth, of bytes read and written."""
    products: Mapping[tuple[int, int, int], float]
    """FLOP/s of products in bfloat16, by rows, summed elements and columns."""
    attention: Mapping[str, float]
    """FLOP/s of cuDNN's causal attention with heads of 64, `forward` and `backward`."""

    def flops_per_second(self, kernel: Kernel) -> float | None:
        """Return the rate of the most similar product, or of attention; None if none is known."""
        if kernel.attends:
            return self.attention[kernel.attends]
        product = kernel.product
        if product is None or kernel.dtype != "bf16":
            return None
        like = [dims for dims in self.products if _is_aligned(dims) == _is_aligned(product)]
        nearest = min(like, key=lambda dims: _distance(dims, product), default=None)
        return None if nearest is None else self.products[nearest]


def _is_aligned(dims: tuple[int, ...]) -> bool:
    return all(size % _ALIGNED == 0 for size in dims)


def _distance(one: tuple[int, ...], other: tuple[int, ...]) -> float:
    """Return how far apart two products are, whichever operands are transposed."""
    pairs = zip(sorted(one), sorted(other), strict=True)
    return math.dist([0.0] * 3, [math.log(a / b) for a, b in pairs])


def _read(facts: Mapping[str, Any]) -> MeasuredRates:
    products = {tuple(dims): rate for *dims, rate in facts["products"]}
    return MeasuredRates(facts["source"], facts["copy"], products, facts["attention"])


RATES: Mapping[str, MeasuredRates] = {
    name: _read(facts)
    for name, facts in json.loads(
        files("replicax.analysis").joinpath("measured_rates.json").read_text(encoding="utf-8")
    ).items()
}
"""The rates of each chip that was measured, by its name in `hardware.toml`."""
