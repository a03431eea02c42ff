"""A factor between what a step gives and what was expected, and the mistake that makes it."""

from collections.abc import Sequence

import numpy as np

from replicax.verify.difference import Difference
from replicax.verify.evidence import Evidence
from replicax.wording import named

NEAR = 2e-2
"""A ratio is a factor where it is this near, relative: weight decay and eps shift it a little."""
_FITTED = 8
"""Elements from which two numbers can be fitted and their fit believed."""


def _factors(evidence: Evidence) -> dict[float, str]:
    """Each factor that a mistake gives, and the mistake."""
    N, K, rows = evidence.replicas, evidence.micro_batches, evidence.rows
    weight = float(evidence.weights.sum()) if evidence.weights is not None else float(rows)
    summed = (
        f"it was summed over {N} replicas and not divided; use pmean, or divide by the number of "
        "replicas (under shard_map with check_vma=True a gradient by replicated parameters is "
        "summed already: do not reduce it again, but differentiate the pmean of the loss)"
    )
    table = [
        (N, summed),
        (1 / N, f"it was divided by {N} replicas twice; pmean divides already: drop one division"),
        (K, f"{K} micro-batches were added and not divided; divide their sum by {K}"),
        (1 / K, f"it was divided by {K} micro-batches twice; drop one division"),
        (
            N * K,
            f"it was summed over {N} replicas and {K} micro-batches and not divided; divide by "
            f"{N * K}",
        ),
        (1 / (N * K), f"it was divided by {N} replicas and by {K} micro-batches twice"),
        (N / K, f"it was summed over {N} replicas undivided, and divided by {K} once too often"),
        (K / N, f"{K} micro-batches were not divided, and {N} replicas were divided by twice"),
        (N * N, f"it was summed over {N} replicas twice; reduce it once"),
        (1 / (N * N), f"it was divided by {N} replicas three times; pmean it once"),
        (
            weight / rows,
            f"the sum was divided by all {rows} rows, those without weight included; divide by "
            f"the sum of the weights, {weight:g}",
        ),
        (weight, f"the sum over the rows was not divided; divide it by {weight:g}"),
        (rows, f"the sum over the rows was not divided by their number, {rows}"),
        (
            weight / N,
            f"the sums over the rows of a replica were averaged over {N} replicas, and not divided "
            f"by the rows; sum over the replicas and divide by {weight:g}",
        ),
    ]
    factors: dict[float, str] = {}
    for factor, text in table:
        known = next((each for each in factors if abs(each - factor) < 1e-2 * each), None)
        if known is None and abs(factor - 1) > 1e-2:
            factors[factor] = text
        elif known is not None and known in (N, 1 / N) and K > 1 and factor in (K, 1 / K):
            factors[known] += f"; or {text}"
    return factors


def factor_cause(evidence: Evidence, differing: Sequence[Difference]) -> str:
    """One factor in all leaves that differ, or its square where a gradient was squared."""
    ratios = {each.path: _ratio(evidence, each) for each in differing}
    for factor, text in _factors(evidence).items():
        by = {
            power: [
                path
                for path, ratio in ratios.items()
                if ratio is not None and abs(ratio / factor**power - 1) < NEAR
            ]
            for power in (1, 2)
        }
        if by[1] and 2 * len(by[1] + by[2]) >= len(differing):
            squares = f" ({named(by[2])}: its square)" if by[2] else ""
            return f"{named(by[1])}: {_times(factor)} the expected{squares}; {text}"
    return ""


def _times(factor: float) -> str:
    if factor >= 1:
        return f"exactly {factor:.4g} times"
    inverse = 1 / factor
    return f"1/{inverse:.0f} of" if abs(inverse - round(inverse)) < 1e-6 else f"{factor:.4g} times"


def _ratio(evidence: Evidence, difference: Difference) -> float | None:
    """Found over expected in one leaf; of its part beside weight decay where there is some."""
    path = difference.path
    if difference.ratio is not None or path not in evidence.values:
        return difference.ratio
    found, expected = evidence.found[path].ravel(), evidence.expected[path].ravel()
    values = evidence.values[path].ravel()
    if found.size < _FITTED or values.size != found.size:
        return None
    columns = np.stack([expected, values], axis=1)
    fit, *_ = np.linalg.lstsq(columns, found, rcond=None)
    rest = np.linalg.norm(found - columns @ fit)
    alone = np.linalg.norm(found - expected * (expected @ found) / max(expected @ expected, 1e-300))
    # Two numbers always fit better than one: only where they fit all of it is there a decay.
    return float(fit[0]) if rest <= min(1e-3 * np.linalg.norm(found), 0.1 * alone) else None
