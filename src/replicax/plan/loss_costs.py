"""Published costs in loss of exchanging less: evaluation loss against data parallelism, tuned.

All on C4 with 20 tokens per parameter. A cost falls as models grow, so that of the largest
published model that is no larger than yours is an upper guess.
"""

from collections.abc import Mapping

from replicax.text.wording import UNKNOWN

_Costs = Mapping[int, Mapping[int, float]]
"""Percent by parameters, then by islands."""

EVERY_30: _Costs = {
    35_000_000: {1: -0.1, 2: 0.7, 4: 2.0, 8: 3.9},
    180_000_000: {1: -0.2, 2: 0.3, 4: 1.1, 8: 2.3},
    550_000_000: {1: -0.3, 2: 0.2, 4: 0.7, 8: 1.7},
    2_400_000_000: {1: -0.4, 2: -0.1, 4: 0.3, 8: 1.1},
}
"""DiLoCo every 30 steps: arXiv 2503.09799, table 4."""
OVERLAPPED_30: _Costs = {
    35_000_000: {2: 0.6, 4: 2.6},
    1_000_000_000: {2: -0.4, 4: 0.4},
}
"""Streaming DiLoCo with 4-bit floats every 30 steps: arXiv 2501.18512, tables 5 and 6."""
OVERLAPPED_100: _Costs = {
    35_000_000: {2: 1.4, 4: 3.7},
    1_000_000_000: {2: 0.4, 4: 1.6},
}
"""The same every 100 steps, and the nearest to DiLoCo every 100 steps that is published."""
_SEVERAL_STEPS = 65
"""Steps above which a cost is that of 100 steps."""


def published_cost(
    parameters: int, islands: int, every: int, send: str, overlapped: bool = False
) -> str:
    """Return the published cost nearest to these sizes, or what is known in words."""
    if every == 1:
        return "none" if send == "float32" else UNKNOWN
    if send == "sparse":
        return "as DiLoCo"
    costs = EVERY_30
    if every > _SEVERAL_STEPS:
        costs = OVERLAPPED_100
    elif overlapped:
        costs = OVERLAPPED_30
    size = max((size for size in costs if size <= parameters), default=min(costs))
    counts = costs[size]
    count = min((each for each in counts if each >= islands), default=max(counts))
    beyond = ">" if count < islands or size > parameters else ""
    return f"{beyond}{counts[count]:+.1f}% {_size_text(size)}"


def _size_text(parameters: int) -> str:
    if parameters >= 1_000_000_000:
        return f"{parameters / 1e9:g}B"
    return f"{parameters / 1e6:g}M"
