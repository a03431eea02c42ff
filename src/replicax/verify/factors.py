"""Factors between found and expected results, and the mistakes that cause them."""

from collections.abc import Sequence

import numpy as np

from replicax.text.wording import named
from replicax.verify.difference import Difference
from replicax.verify.evidence import Evidence

NEAR = 2e-2
"""Relative tolerance for matching a factor: weight decay and eps shift the ratio slightly."""
_FITTED = 8
"""Fewest elements for which a fit of two numbers is trusted."""


def _factors(evidence: Evidence) -> dict[float, str]:
    """Return the factors that mistakes cause, with a description of each mistake."""
    N, K, rows = evidence.replicas, evidence.micro_batches, evidence.rows
    weight = float(evidence.weights.sum()) if evidence.weights is not None else float(rows)
    summed = (
        f"it was summed over {N} replicas and not divided; use pmean, or divide by the number of "
        "replicas (under shard_map with check_vma=True the gradient of replicated parameters is "
        "already summed: differentiate the pmean of the loss instead of reducing it again)"
    )
    table = [
        (N, summed),
        (1 / N, f"it was divided by {N} replicas twice; pmean already divides: drop one division"),
        (K, f"{K} micro-batches were added and not divided; divide their sum by {K}"),
        (1 / K, f"it was divided by {K} micro-batches twice; drop one division"),
        (
            N * K,
            f"it was summed over {N} replicas and {K} micro-batches and not divided; divide by "
            f"{N * K}",
        ),
        (1 / (N * K), f"it was divided by {N} replicas and by {K} micro-batches twice"),
        (N / K, f"it was summed over {N} replicas and not divided, and divided by {K} twice"),
        (K / N, f"{K} micro-batches were added and not divided, and {N} replicas divided twice"),
        (N * N, f"it was summed over {N} replicas twice; reduce it once"),
        (1 / (N * N), f"it was divided by {N} replicas three times; pmean it once"),
        (
            weight / rows,
            f"the sum was divided by all {rows} rows, including those of weight 0; divide by "
            f"the sum of the weights, {weight:g}",
        ),
        (weight, f"the sum over the rows was not divided; divide it by {weight:g}"),
        (rows, f"the sum over the rows was not divided by their number, {rows}"),
        (
            weight / N,
            f"the sums over each replica's rows were averaged over {N} replicas and not divided by "
            f"the number of rows; sum over the replicas and divide by {weight:g}",
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
    """Explain all differing leaves by one factor, or its square where gradients are squared."""
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
    """Return found over expected in one leaf, excluding weight decay if there is any."""
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
    # Two numbers always fit better than one: require a complete fit to conclude weight decay.
    return float(fit[0]) if rest <= min(1e-3 * np.linalg.norm(found), 0.1 * alone) else None
