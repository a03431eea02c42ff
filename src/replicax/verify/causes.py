"""Explain why a step's results differ from one device's, by testing hypotheses.

Each hypothesis predicts results: N times the reference, the mean over replicas of the reference on
each replica's rows, and so on. The hypothesis that reproduces the step's results names the cause.
If none does, the text says so.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from replicax.text.wording import named
from replicax.verify.difference import (
    MISSING,
    NOT_NUMBERS,
    SHAPE,
    Difference,
    Leaves,
    constant_ratio,
    is_float,
    leaf_differences,
)
from replicax.verify.evidence import EXPLAINED, MOST_REPLICAS, Evidence
from replicax.verify.factors import factor_cause

NO_CAUSE = "no known cause fits"
"""Start of the text if no hypothesis reproduces the results."""
_APART = 0.05
"""Replicas have different scales if these differ by at least this fraction."""
_OTHER_DIVISORS = (16, 32, 64, 128, 256, 512, 10, 100, *range(2, 33))
"""Numbers that batches are truncated to a multiple of, the usual ones first."""


def likely_cause(evidence: Evidence) -> str:
    """Return the likely cause of the difference and its fix, in one or two sentences.

    Empty if nothing differs.
    """
    differing = leaf_differences(evidence.found, evidence.expected, evidence.bounds)
    if not differing and evidence.of_replica is None:
        return ""
    if text := _of_odd_leaves(evidence, differing):
        return text
    text, paths = _of_replicas(evidence)
    others = [each for each in differing if each.path not in paths]
    if text and not others:
        return text
    other = factor_cause(evidence, others) or _best(evidence, [each.path for each in others])
    if text or other:
        return ". ".join(each for each in (text, other) if each)
    return _unexplained(evidence, differing)


def _of_odd_leaves(evidence: Evidence, differing: Sequence[Difference]) -> str:
    """Explain leaves that cannot be compared as numbers."""
    for each in differing:
        if each.what.startswith((MISSING, SHAPE)):
            return f"{each}: return it as the reference does"
    broken = [each.path for each in differing if each.what == NOT_NUMBERS]
    if not broken:
        return ""
    text = f"{named(broken)} {NOT_NUMBERS} where one device gives finite values"
    without = np.flatnonzero(evidence.shares == 0)
    if evidence.weights is not None and without.size:
        empty = ", ".join(map(str, without))
        return (
            f"{text}: the rows of replica {empty} have zero total weight, so a mean per replica "
            "divides 0 by 0 there; sum loss and weights over all replicas first, then divide once"
        )
    return text


# Replicas that hold different values.


def _of_replicas(evidence: Evidence) -> tuple[str, list[str]]:
    """Return the cause if replicas differ, and the paths that differ."""
    if evidence.of_replica is None:
        return "", []
    held = [evidence.of_replica(replica) for replica in range(evidence.replicas)]
    paths = [
        path
        for path, first in held[0].items()
        if not all(
            np.array_equal(first, other[path], equal_nan=is_float(first)) for other in held[1:]
        )
    ]
    if not paths:
        return "", []
    text = (
        _on_few(evidence, held, paths)
        or _on_own_rows(evidence, held, paths)
        or _scales(evidence, held, paths)
        or (
            f"{named(paths)}: not the same on all replicas; it depends on something that differs "
            "between them (rows, key, axis_index) and is not reduced: apply lax.pmean to it"
        )
    )
    return text, paths


def _on_few(evidence: Evidence, held: Sequence[Leaves], paths: Sequence[str]) -> str:
    """Explain a few replicas that differ from one device while most do not."""
    wrong = [
        replica
        for replica, results in enumerate(held)
        if any(
            each.path in paths
            for each in leaf_differences(results, evidence.expected, evidence.bounds)
        )
    ]
    if not wrong or len(wrong) > evidence.replicas // 2:
        return ""
    numbers = ", ".join(str(replica) for replica in wrong)
    return (
        f"{named(paths)}: differs on replica {numbers} only; the others agree with one device. "
        "Something depends on the replica index: compute it the same way on every replica"
    )


def _on_own_rows(evidence: Evidence, held: Sequence[Leaves], paths: Sequence[str]) -> str:
    """Explain replicas that hold the results of their own rows."""
    if not evidence.divides:
        return ""
    pairs = list(zip(held, evidence.own, strict=True))
    matched = [
        path
        for path in paths
        if path in evidence.expected and all(evidence.explained(path, *pair) for pair in pairs)
    ]
    if not matched or 4 * len(matched) < len(paths):
        return ""
    return (
        f"{named(matched)}: each replica holds the result of its own rows; it was never reduced "
        "over the replicas: apply lax.pmean to it (for a gradient, before the optimizer update)"
    )


def _scales(evidence: Evidence, held: Sequence[Leaves], paths: Sequence[str]) -> str:
    """Explain replicas that take the same step at different scales."""
    for path in paths:
        expected = evidence.expected.get(path)
        if expected is None or not is_float(expected) or not np.any(expected):
            continue
        scales = (constant_ratio(each[path], expected, near=1e-2) for each in held)
        ratios = [ratio for ratio in scales if ratio is not None]
        if len(ratios) == len(held) and max(ratios) - min(ratios) > _APART * max(map(abs, ratios)):
            listed = ", ".join(f"{ratio:.3g}" for ratio in ratios)
            return (
                f"the change of {path} is {listed} times the expected one on successive replicas: "
                "each scales the same step differently, for example by a learning rate that "
                "depends on the replica index; use the same scale on all"
            )
    return ""


# Rows that were left out, or grouped differently.


def _best(evidence: Evidence, paths: Sequence[str]) -> str:
    """Return the hypothesis that explains the most leaves, and a second one for the rest."""
    tried: list[tuple[str, list[str], int]] = []
    for order, (text, results) in enumerate(_hypotheses(evidence)):
        matched = [path for path in paths if evidence.explained(path, evidence.found, results)]
        if matched:
            tried.append((text, matched, order))
        if len(matched) == len(paths):
            break
    sentences: list[str] = []
    left = list(paths)
    while tried and left and len(sentences) < 2:
        text, matched, _ = max(tried, key=lambda each: (len(set(each[1]) & set(left)), -each[2]))
        new = [path for path in matched if path in left]
        if not new or (not sentences and 4 * len(new) < len(paths)):
            break
        where = "" if len(new) == len(paths) and len(paths) > 1 else f"{named(new)}: "
        sentences.append(where + text)
        left = [path for path in left if path not in new]
    return ". ".join(sentences)


def _hypotheses(evidence: Evidence) -> Iterator[tuple[str, Leaves]]:
    still = {
        path: np.zeros_like(value)
        for path, value in evidence.expected.items()
        if is_float(value) and path not in evidence.losses
    }
    yield (
        "it does not change at all: its gradient does not reach the optimizer, or the step returns "
        "the old value; return the updated one",
        still,
    )
    for hypothesis in evidence.others:
        yield hypothesis.text, hypothesis.results()
    if evidence.on_rows is None:
        return
    N, K = evidence.replicas, evidence.micro_batches
    yield from _of_dropped_rows(evidence, (N, K, N * K))
    if evidence.divides:
        yield from _of_own_rows(evidence)
    if K > 1 and evidence.rows % (N * K) == 0:
        yield from _of_micro_batches(evidence)
    if not evidence.divides:
        yield from _of_dropped_rows(evidence, _OTHER_DIVISORS)


def _of_dropped_rows(evidence: Evidence, divisors: Sequence[int]) -> Iterator[tuple[str, Leaves]]:
    assert evidence.on_rows is not None
    rows = evidence.rows
    seen = {rows, 0}
    for divisor in divisors:
        kept = rows - rows % divisor
        if kept in seen:
            continue
        seen.add(kept)
        for side, indices in (("last", np.arange(kept)), ("first", np.arange(rows - kept, rows))):
            yield (
                f"the {side} {rows - kept} of {rows} rows were dropped, because {rows} is not a "
                f"multiple of {divisor}; pad the batch and give padded rows weight 0",
                evidence.on_rows(indices),
            )


def _of_own_rows(evidence: Evidence) -> Iterator[tuple[str, Leaves]]:
    N = evidence.replicas
    mean = _mean(evidence.own)
    shares = evidence.shares
    uneven, among = np.ptp(shares) > 1e-6 * shares.max(), ""
    if not uneven and (inside := _shares_inside(evidence)) is not None:
        shares, uneven, among = inside, True, " times replica 0's, computed inside the step"
    if uneven:
        least, most = shares.min(), shares.max()
        text = (
            f"it is a mean of means: each of {N} replicas divided by its own weight (from "
            f"{least:.4g} to {most:.4g}{among}), and the {N} means were averaged with equal "
            "weight; sum numerator and weights over all replicas (psum), then divide once"
        )
    else:
        text = _nonlinear(evidence)
    yield text, mean
    total = {path: N * value if is_float(value) else value for path, value in mean.items()}
    yield f"{text}. It was also summed over {N} replicas and not divided: use pmean", total
    for replica, results in enumerate(evidence.own):
        yield (
            f"it is the result of the rows of replica {replica} alone: it was returned without "
            "being reduced over the replicas; apply lax.pmean to it, or use all replicas' rows",
            results,
        )


def _shares_inside(evidence: Evidence) -> np.ndarray | None:
    """Return the replicas' weights relative to replica 0's, inferred from the reference.

    Its result on the rows of two replicas must be the weighted mean of its results on each, and
    the same weights must explain its result on all rows. None if there are no such weights.
    """
    assert evidence.on_rows is not None
    if not evidence.losses:
        return None

    def losses(results: Leaves) -> np.ndarray:
        values = [np.ravel(results[path]).astype(np.float64) for path in evidence.losses]
        return np.concatenate(values)

    blocks = np.arange(evidence.rows).reshape(evidence.replicas, -1)
    own = np.stack([losses(each) for each in evidence.own])
    shares = [1.0]
    for replica in range(1, evidence.replicas):
        both = losses(evidence.on_rows(blocks[[0, replica]].ravel()))
        from_other = both - own[replica]
        square = float(from_other @ from_other)
        shares.append(float((own[0] - both) @ from_other) / square if square else 1.0)
    if min(shares) <= 0:
        return None
    expected, plain = losses(evidence.expected), own.mean(axis=0)
    foretold = np.average(own, axis=0, weights=shares)
    rest, gap = np.linalg.norm(foretold - expected), np.linalg.norm(plain - expected)
    return np.array(shares) if rest <= EXPLAINED * gap else None


def _nonlinear(evidence: Evidence) -> str:
    """Explain a mean over equally weighted replicas that is not the mean over all rows."""
    whole = "it is the mean of the reference's results on each replica's rows alone"
    losses = {path: evidence.expected[path] for path in evidence.losses}
    if losses and not leaf_differences({**losses, **evidence.found}, losses, evidence.bounds):
        return (
            f"{whole}, while the loss agrees: an operation that is not linear in the gradient "
            "(clipping, normalization, an optimizer update) precedes the reduction; reduce the "
            "gradient first, then clip and update"
        )
    return (
        f"{whole}: the rows of a batch depend on one another, as in BatchNorm statistics or a "
        "contrastive loss, and each replica sees only its own rows; give BatchNorm an axis_name, "
        "or gather the rows (lax.all_gather) before the loss"
    )


def _of_micro_batches(evidence: Evidence) -> Iterator[tuple[str, Leaves]]:
    assert evidence.on_rows is not None
    N, K, rows = evidence.replicas, evidence.micro_batches, evidence.rows
    index = np.arange(rows)
    # [K, N, rows]: contiguous within a replica, every K-th row of it, contiguous in the batch.
    cuts = (
        index.reshape(N, K, -1).swapaxes(0, 1),
        index.reshape(N, -1, K).transpose(2, 0, 1),
        index.reshape(K, N, -1),
    )
    for cut in cuts:
        for name, part in (("last", cut[-1]), ("first", cut[0])):
            yield (
                f"only the {name} of {K} micro-batches was used: the gradients of the others were "
                f"overwritten; add them all and divide by {K}",
                evidence.on_rows(np.sort(part.ravel())),
            )
    if N > MOST_REPLICAS:
        return
    for cut in cuts:
        parts = [evidence.on_rows(cut[k, n]) for k in range(K) for n in range(N)]
        yield (
            f"it is the mean over {N} replicas and {K} micro-batches of each one's own result: a "
            "mean of means if their weights differ, or rows that depend on one another "
            "(BatchNorm); sum numerator and weights over all of them, then divide once",
            _mean(parts),
        )


# Helpers.


def _mean(parts: Sequence[Leaves]) -> Leaves:
    return {
        path: np.mean([part[path] for part in parts], axis=0)
        if is_float(value) and len({np.shape(part[path]) for part in parts}) == 1
        else value
        for path, value in parts[0].items()
    }


def _unexplained(evidence: Evidence, differing: Sequence[Difference]) -> str:
    worst = max(differing, key=lambda each: each.relative)
    return (
        f"{NO_CAUSE}: no factor, no mean of means, no subset of rows explains it; "
        f"{len(differing)} of {len(evidence.expected)} leaves differ, most of all {worst.path}, by "
        f"{worst.relative:.1%} of its norm"
    )
