"""Cases in which a hand-written step must agree with its single-device form."""

import contextlib
import io
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from replicax.core.ground.leaves import PyTree
from replicax.errors import ConfigError
from replicax.text.checks import FAIL, NOTE, PASS, SKIP, Check
from replicax.text.wording import first_line, named
from replicax.verify.batch_rows import rows_of_batch, take, weights_of, with_weights
from replicax.verify.causes import likely_cause
from replicax.verify.copies import Copies
from replicax.verify.difference import Difference, Leaves, is_float, leaf_differences, leaves
from replicax.verify.evidence import Hypothesis
from replicax.verify.trial import Trial

INDIVISIBLE = "indivisible batch"
UNEQUAL = ("unequal weights", "padded batch")
_SHARED_DRAWS = (
    "all replicas draw the same random numbers: given the same rows, they return exactly the "
    "result of one device on these rows, including dropout masks; fold the replica index into the "
    "key (jax.random.fold_in(key, lax.axis_index(axis)))"
)


def parity(
    trial: Trial,
    case: str,
    batches: Sequence[PyTree],
    *,
    weights: str | None = None,
    others: Sequence[Hypothesis] = (),
    known: Callable[[Sequence[Difference]], str] | None = None,
) -> tuple[Check, Copies | None]:
    """Compare the step with its reference after all `batches`; also return the step's results.

    Args:
        trial: the step and its reference.
        case: the name of the case in the table.
        batches: one for each consecutive step.
        weights: the path of the batch leaf with the row weights.
        others: additional hypotheses on a difference, tried before the built-in ones.
        known: returns a cause that is already known, tried first.
    """
    rows = rows_of_batch(batches[0])
    copies = trial.run(batches)
    expected = trial.expected(batches)
    expected, found = _common(expected, _found(trial, copies), trial)
    expected = trial.given(found, expected)
    bounds = trial.bounds(expected, batches, rows)
    apart = leaf_differences(found, expected, bounds)
    figures: dict[str, Any] = {"rows": rows, "steps": len(batches), "leaves": len(expected)}
    figures |= {"against": trial.against, "differing": len(apart)}
    if not apart:
        text, largest = _agreement(trial, found, expected, bounds)
        return Check("parity", case, PASS, text, "", figures | largest), copies
    if random := _random(trial, case, batches, rows, bounds):
        return random, copies
    cause = (known(apart) if known else "") or likely_cause(
        trial.evidence(
            found,
            expected,
            bounds,
            batches,
            weights=weights_of(batches[0], weights) if weights else None,
            of_replica=lambda replica: _only(expected, trial.changes(copies.of(replica))),
            values=trial.named(leaves({"state": trial.state})),
            others=others,
        )
    )
    first = apart[0]
    more = f"; {len(apart)} of {len(expected)} leaves differ" if len(expected) > 1 else ""
    figures["first"] = first.to_json()
    return Check("parity", case, FAIL, f"{first}{more}", cause, figures), copies


def weighted(trial: Trial, batch: PyTree, path: str) -> list[Check]:
    """Check rows of unequal weight, and padded rows of weight 0 at the end."""
    rows = rows_of_batch(batch)
    checks = []
    # Every other replica has only half of its rows; the first row of each replica always counts.
    place = np.arange(rows) % max(rows // trial.replicas, 1)
    replica = np.arange(rows) // max(rows // trial.replicas, 1)
    unequal = np.where((replica % 2 == 1) & (place % 2 == 1), 0, 1)
    padded = np.arange(rows) < rows - rows // trial.replicas - 1
    for case, weights in zip(UNEQUAL, (unequal, padded), strict=True):
        given = with_weights(batch, path, weights.astype(np.float64))
        if not weights.any() or weights.all():
            continue
        ones = with_weights(batch, path, np.ones(rows))
        ignored = Hypothesis(
            f"the weights are ignored: all {rows} rows count, including the "
            f"{int(rows - weights.sum())} of weight 0 (padding); multiply each row's loss by its "
            "weight and divide by the sum of the weights",
            lambda ones=ones: trial.expected([ones]),  # type: ignore[misc]
        )
        checks.append(parity(trial, case, [given], weights=path, others=[ignored])[0])
    return checks


def indivisible(trial: Trial, batch: PyTree) -> Check:
    """Check a batch whose rows do not divide over the replicas: refused or correct, never cut."""
    case = INDIVISIBLE
    rows = rows_of_batch(batch)
    fewer = rows - trial.replicas // 2 - 1
    if fewer < 1 or fewer % trial.replicas == 0:
        return Check("parity", case, SKIP, f"{rows} rows are too few to remove any")
    part = take(batch, np.arange(fewer))
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # jax 0.12.0.1 prints a line of source
            trial.run([part])
    except ConfigError as error:
        return Check("parity", case, NOTE, str(error))
    except Exception as error:
        return Check("parity", case, NOTE, f"refuses {fewer} rows: {first_line(error)}")
    others = [
        Hypothesis(
            f"{fewer} rows were padded to {whole} with {what}, and padded rows count as real ones; "
            "give them weight 0 and divide by the sum of the weights",
            lambda padding=padding: trial.expected([padding]),  # type: ignore[misc]
        )
        for whole, what, padding in _paddings(part, fewer, trial.replicas)
    ]
    return parity(trial, case, [part], others=others)[0]


def _paddings(part: PyTree, rows: int, replicas: int) -> list[tuple[int, str, PyTree]]:
    """Return the usual ways to pad a batch to a multiple of the replicas."""
    missing = -rows % replicas
    index = np.arange(rows)

    def zeros(leaf: Any) -> Any:
        if getattr(leaf, "ndim", 0) == 0:
            return leaf
        return np.concatenate([leaf, np.zeros((missing, *leaf.shape[1:]), leaf.dtype)])

    whole = rows + missing
    return [
        (whole, "zeros", jax.tree.map(zeros, part)),
        (whole, "its first rows", take(part, np.resize(index, whole))),
        (whole, "its last row", take(part, np.minimum(np.arange(whole), rows - 1))),
    ]


def _random(
    trial: Trial, case: str, batches: Sequence[PyTree], rows: int, bounds: Leaves
) -> Check | None:
    """Return the row for a step that draws random numbers, or None if it does not."""
    reseeded = trial.reseeded()
    if reseeded is None:
        return None
    one, other = (each.expected(batches) for each in (trial, reseeded))
    floats = {path: value for path, value in one.items() if is_float(value)}  # not keys
    if not leaf_differences(other, floats, bounds):
        return None
    N = trial.replicas
    if N > 1 and rows % N == 0:
        block = [take(batch, np.arange(rows // N)) for batch in batches]
        tiled = [take(batch, np.tile(np.arange(rows // N), N)) for batch in batches]
        alone = trial.expected(block)
        alone, together = _common(alone, _found(trial, trial.run(tiled)), trial)
        if not leaf_differences(together, alone, trial.bounds(alone, block, rows)):
            found = "differs, and all replicas use the same random numbers"
            return Check("parity", case, FAIL, found, _SHARED_DRAWS, {"rows": rows})
    return Check(
        "parity",
        case,
        SKIP,
        "random: the reference depends on its key and the step draws differently; to compare "
        "their numbers, pass versions that draw nothing (dropout rate 0)",
        "",
        {"rows": rows},
    )


def _found(trial: Trial, copies: Copies) -> Leaves:
    """Return replica 0's results, with the mean of stacked metrics that differ."""
    found = trial.changes(copies.of(0))
    for path in copies.unequal:
        if path in copies.stacked and not path.startswith("state"):
            found[path] = np.mean(copies.held[path], axis=0)
    return found


def _common(expected: Leaves, found: Leaves, trial: Trial) -> tuple[Leaves, Leaves]:
    """Drop the metrics that only one of the two returns; the state must be complete."""
    paths = [path for path in expected if path in found or path.startswith("state")]
    shaped = {
        path: found[path].reshape(shape)
        for path, shape in trial.named(trial.shapes).items()
        if not path.startswith("state") and path in found and found[path].size == math.prod(shape)
    }
    return {path: expected[path] for path in paths}, {**found, **shaped}


def _only(wanted: Leaves, found: Leaves) -> Leaves:
    return {path: value for path, value in found.items() if path in wanted}


def _agreement(
    trial: Trial, found: Leaves, expected: Leaves, bounds: Leaves
) -> tuple[str, dict[str, float]]:
    """Describe the agreement: the leaf with the largest difference, and leaves not compared."""
    worst, where, allowed, of_bound = 0.0, "", 0.0, 0.0
    rounding = []
    for path, bound in bounds.items():
        scale = float(np.max(np.abs(expected[path]), initial=0.0))
        if not scale:
            continue
        if float(np.median(bound)) >= scale:
            rounding.append(path)
            continue
        gap = np.abs(found[path] - expected[path])
        of_bound = max(of_bound, float(np.max(gap[bound > 0] / bound[bound > 0], initial=0.0)))
        place = np.unravel_index(int(np.argmax(np.nan_to_num(gap))), gap.shape)
        if gap[place] / scale > worst:
            worst, where, allowed = gap[place] / scale, path, bound[place] / scale
    text = f"{len(expected) - len(rounding)} leaves agree with {trial.against}"
    if where:
        text += f"; largest difference in {where}: {worst:.0e} (bound {allowed:.0e})"
    else:
        text += ", bit for bit"
    if rounding:
        text += f"; {named(rounding)}: only rounding, not compared"
    return text, {"largest": float(worst), "of_bound": of_bound}
