"""Why a step gives other numbers than one device: hypotheses held against what was computed.

Each hypothesis is a set of numbers: N times the reference, the mean over the replicas of what the
reference gives on the rows of each, and so on. The one that reproduces what was found names the
cause. Where none does, the text says so.
"""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from replicax.verify.difference import Difference, Leaves, differences, is_float
from replicax.verify.evidence import Evidence
from replicax.verify.factors import factor_cause
from replicax.wording import named

NO_CAUSE = "no known cause fits"
"""How the text begins where no hypothesis reproduces what was found."""
EXPLAINED = 0.1
"""A hypothesis explains a leaf where at most this share of the difference is left."""
_APART = 0.05
"""Scales of replicas are told from one another where they differ by this share."""
_OTHER_DIVISORS = (16, 32, 64, 128, 256, 512, 10, 100, *range(2, 33))
"""Divisors of batches that are cut to a multiple of something, the usual ones first."""
_MOST_REPLICAS = 16
"""Runs of the reference on one replica's rows; with more replicas, these are not tried."""


def likely_cause(evidence: Evidence) -> str:
    """The likely cause of the difference, with its fix, in one or two sentences.

    Empty where nothing differs.
    """
    differing = differences(evidence.found, evidence.expected, evidence.bounds)
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
    """Leaves that cannot be compared as numbers."""
    for each in differing:
        found, expected = evidence.found.get(each.path), evidence.expected[each.path]
        if found is None:
            return f"{each.path} is missing from what the step returns: return it"
        if found.shape != expected.shape:
            return (
                f"{each.path} has shape {list(found.shape)} where one device gives "
                f"{list(expected.shape)}: return it as the reference does"
            )
    broken = [
        each.path
        for each in differing
        if is_float(evidence.found[each.path])
        and not np.isfinite(evidence.found[each.path]).all()
        and np.isfinite(evidence.expected[each.path]).all()
    ]
    if not broken:
        return ""
    text = f"{named(broken)} holds NaN or infinity where one device gives numbers"
    shares = _shares(evidence)
    if evidence.weights is not None and (shares == 0).any():
        empty = ", ".join(str(replica) for replica in np.flatnonzero(shares == 0))
        return (
            f"{text}: the rows of replica {empty} have no weight at all, and a mean by replica "
            "divides 0 by 0 there; sum loss and weights over all replicas first, then divide once"
        )
    return text


# One cause: replicas that hold different numbers.


def _of_replicas(evidence: Evidence) -> tuple[str, list[str]]:
    """The cause where replicas differ, and the paths in which they do."""
    if evidence.of_replica is None:
        return "", []
    held = [evidence.of_replica(replica) for replica in range(evidence.replicas)]
    paths = [path for path in held[0] if any(_unequal(held[0], other, path) for other in held[1:])]
    if not paths:
        return "", []
    text = (
        _on_few(evidence, held, paths)
        or _on_own_rows(evidence, held, paths)
        or _scales(evidence, held, paths)
        or (
            f"{named(paths)}: not the same on all replicas; it follows from something that each "
            "has of its own (rows, key, axis_index) and that is not reduced: apply lax.pmean to it"
        )
    )
    return text, paths


def _on_few(evidence: Evidence, held: Sequence[Leaves], paths: Sequence[str]) -> str:
    """Replicas that differ from one device while most do not."""
    wrong = [
        replica
        for replica, results in enumerate(held)
        if any(
            each.path in paths for each in differences(results, evidence.expected, evidence.bounds)
        )
    ]
    if not wrong or len(wrong) > evidence.replicas // 2:
        return ""
    numbers = ", ".join(str(replica) for replica in wrong)
    return (
        f"{named(paths)}: differs on replica {numbers} only, and the others hold what one device "
        "gives. Something there depends on the replica's index: compute it the same everywhere"
    )


def _on_own_rows(evidence: Evidence, held: Sequence[Leaves], paths: Sequence[str]) -> str:
    """Replicas that hold what the rows of each give."""
    if not _divide(evidence):
        return ""
    matched = [
        path
        for path in paths
        if path in evidence.expected
        and all(
            _explains(evidence, path, results, own)
            for results, own in zip(held, evidence.own, strict=True)
        )
    ]
    if not matched or 4 * len(matched) < len(paths):
        return ""
    return (
        f"{named(matched)}: each replica holds what its own rows give; it was never reduced over "
        "the replicas: apply lax.pmean to it (for a gradient, before the optimizer's update)"
    )


def _scales(evidence: Evidence, held: Sequence[Leaves], paths: Sequence[str]) -> str:
    """Replicas that take the same step, each at a scale of its own."""
    for path in paths:
        expected = evidence.expected.get(path)
        if expected is None or not is_float(expected) or not np.any(expected):
            continue
        ratios = [ratio for each in held if (ratio := _ratio(each[path], expected)) is not None]
        if len(ratios) == len(held) and max(ratios) - min(ratios) > _APART * max(map(abs, ratios)):
            listed = ", ".join(f"{ratio:.3g}" for ratio in ratios)
            return (
                f"the change of {path} is {listed} times the expected one on the replicas in turn: "
                "each takes the same step at a scale of its own, a learning rate that depends on "
                "the replica's index, say; use the same on all"
            )
    return ""


# One cause: other rows than all of them, or in other groups.


def _best(evidence: Evidence, paths: Sequence[str]) -> str:
    """The hypothesis that explains the most leaves; a second one for what it leaves over."""
    tried: list[tuple[str, list[str], int]] = []
    for order, (text, results) in enumerate(_hypotheses(evidence)):
        matched = [path for path in paths if _explains(evidence, path, evidence.found, results)]
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
        if is_float(value) and "loss" not in path.lower()
    }
    yield (
        "it does not change at all: its gradient does not reach the optimizer, or the step returns "
        "the old value; return what the update gives",
        still,
    )
    for hypothesis in evidence.others:
        yield hypothesis.text, hypothesis.results()
    if evidence.on_rows is None:
        return
    N, K = evidence.replicas, evidence.micro_batches
    yield from _of_dropped_rows(evidence, (N, K, N * K))
    if _divide(evidence):
        yield from _of_own_rows(evidence)
    parts = evidence.replicas * evidence.micro_batches
    if evidence.micro_batches > 1 and evidence.rows % parts == 0:
        yield from _of_micro_batches(evidence)
    if not _divide(evidence):
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
                f"the {side} {rows - kept} of {rows} rows were dropped, because {rows} do not "
                f"divide over {divisor}; pad the batch and give the padding weight 0",
                evidence.on_rows(indices),
            )


def _of_own_rows(evidence: Evidence) -> Iterator[tuple[str, Leaves]]:
    N = evidence.replicas
    mean = _mean(evidence.own)
    shares = _shares(evidence)
    uneven, among = np.ptp(shares) > 1e-6 * shares.max(), ""
    if not uneven and (inside := _shares_inside(evidence)) is not None:
        shares, uneven, among = inside, True, " times replica 0's, made inside the step"
    if uneven:
        least, most = shares.min(), shares.max()
        text = (
            f"it is a mean of means: each of {N} replicas divided by its own weight (from "
            f"{least:.4g} to {most:.4g}{among}), and the {N} means were averaged as if they "
            "weighed the same; "
            "sum numerator and weights over all replicas (psum), then divide once"
        )
    else:
        text = _nonlinear(evidence, mean)
    yield text, mean
    total = {path: N * value if is_float(value) else value for path, value in mean.items()}
    yield f"{text}. It was also summed over {N} replicas and not divided: use pmean", total
    for replica, results in enumerate(evidence.own):
        yield (
            f"it is what the rows of replica {replica} alone give: reduced over the replicas it "
            "is not (written but not reduced); apply lax.pmean to it, or use all replicas' rows",
            results,
        )


def _shares_inside(evidence: Evidence) -> np.ndarray | None:
    """The weights of the replicas' rows in units of replica 0's, where the reference shows them.

    What it gives on the rows of two replicas is the mean of what it gives on each, with weights
    that explain what it gives on all rows too. None where there are no such weights.
    """
    assert evidence.on_rows is not None
    paths = [path for path in evidence.expected if "loss" in path.lower()]
    if not paths:
        return None

    def losses(results: Leaves) -> np.ndarray:
        return np.concatenate([np.ravel(results[path]).astype(np.float64) for path in paths])

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


def _nonlinear(evidence: Evidence, mean: Leaves) -> str:
    """Rows weigh the same, and still their replicas' mean is not the mean of all."""
    losses = [path for path in evidence.expected if "loss" in path.lower()]
    whole = "it is the mean of what the reference gives on each replica's rows by themselves"
    forward = [
        path
        for path in losses
        if differences(
            {path: evidence.found.get(path, evidence.expected[path])},
            {path: evidence.expected[path]},
            evidence.bounds,
        )
    ]
    if losses and not forward:
        return (
            f"{whole}, while the loss agrees: something not linear in the gradient (clipping, "
            "normalising, an optimizer's update) came before the reduction; reduce the gradient "
            "first, then clip and update"
        )
    return (
        f"{whole}: the rows of a batch depend on one another there, as in BatchNorm's statistics "
        "or a loss that contrasts the rows of a batch, and each replica sees its own only; give "
        "BatchNorm an axis_name, or gather the rows (lax.all_gather) before the loss"
    )


def _of_micro_batches(evidence: Evidence) -> Iterator[tuple[str, Leaves]]:
    assert evidence.on_rows is not None
    N, K, rows = evidence.replicas, evidence.micro_batches, evidence.rows
    index = np.arange(rows)
    # [K, N, rows of one]: in runs within a replica, every K-th row of it, in runs of the batch.
    cuts = (
        index.reshape(N, K, -1).swapaxes(0, 1),
        index.reshape(N, -1, K).transpose(2, 0, 1),
        index.reshape(K, N, -1),
    )
    for cut in cuts:
        for name, part in (("last", cut[-1]), ("first", cut[0])):
            yield (
                f"only the {name} of {K} micro-batches was used: the others' gradients were "
                f"overwritten; add them all and divide by {K}",
                evidence.on_rows(np.sort(part.ravel())),
            )
    if N > _MOST_REPLICAS:
        return
    for cut in cuts:
        parts = [evidence.on_rows(cut[k, n]) for k in range(K) for n in range(N)]
        yield (
            f"it is the mean over {N} replicas and {K} micro-batches of what each gives by itself: "
            "a mean of means where they do not weigh the same, or rows that depend on one another "
            "(BatchNorm); sum numerator and weights over all of them, then divide once",
            _mean(parts),
        )


# What all of them use.


def _divide(evidence: Evidence) -> bool:
    """Whether the reference can be run on each replica's rows."""
    return (
        evidence.on_rows is not None
        and 1 < evidence.replicas <= _MOST_REPLICAS
        and evidence.rows % evidence.replicas == 0
    )


def _shares(evidence: Evidence) -> np.ndarray:
    """The weight of each replica's rows."""
    weights = np.ones(evidence.rows) if evidence.weights is None else evidence.weights
    parts = np.array_split(np.asarray(weights, np.float64), evidence.replicas)
    return np.array([part.sum() for part in parts])


def _mean(parts: Sequence[Leaves]) -> Leaves:
    return {
        path: np.mean([part[path] for part in parts], axis=0) if is_float(value) else value
        for path, value in parts[0].items()
    }


def _explains(
    evidence: Evidence, path: str, found: Mapping[str, np.ndarray], results: Leaves
) -> bool:
    """Whether `results` leave little of the difference in one leaf."""
    if path not in results or path not in found or results[path].shape != found[path].shape:
        return False
    here, there, guess = found[path], evidence.expected[path], results[path]
    if not is_float(there):
        return bool(np.array_equal(here, guess))
    if not np.isfinite(guess).all():
        return False
    rest, gap = np.linalg.norm(here - guess), np.linalg.norm(here - there)
    return bool(rest <= EXPLAINED * gap)


def _unequal(left: Leaves, right: Leaves, path: str) -> bool:
    return not np.array_equal(left[path], right[path], equal_nan=is_float(left[path]))


def _ratio(found: np.ndarray, expected: np.ndarray) -> float | None:
    square = float(np.sum(expected * expected))
    ratio = float(np.sum(found * expected)) / square
    rest = float(np.linalg.norm(found - ratio * expected))
    return ratio if rest <= 1e-2 * max(abs(ratio), 1e-2) * square**0.5 else None


def _unexplained(evidence: Evidence, differing: Sequence[Difference]) -> str:
    worst = max(differing, key=lambda each: each.relative)
    return (
        f"{NO_CAUSE}: no factor, no mean of means, no subset of rows gives it; "
        f"{len(differing)} of {len(evidence.expected)} leaves differ, the most {worst.path}, by "
        f"{worst.relative:.1%} of its norm"
    )
