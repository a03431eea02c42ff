"""Check the compiled program of a hand-written step: reductions and redundant work."""

from typing import Any

import jax
import numpy as np

from replicax.analysis.compiled import CompiledStep, inspect
from replicax.checks import FAIL, NOTE, PASS, SKIP, Check
from replicax.core.ground.leaves import PyTree
from replicax.verify.batch_rows import row_count, take
from replicax.verify.trial import Trial, arguments_of
from replicax.wording import first_line

REDUNDANT = 1.1
"""A device that computes more than this many times its share repeats work of others."""
ALL = 0.9
"""At this share of the total work, a device counts as computing all of it."""
_SLACK_BYTES = 4096
"""Allowance for metrics, weights and counts, which are reduced with the gradient."""
_REDUCTIONS = ("all-reduce", "reduce-scatter", "all-gather")


def program_checks(trial: Trial, batch: PyTree, gradient_bytes: int) -> list[Check]:
    """Return the rows on traffic and redundant work of the step on one batch."""
    try:
        step = _compiled(trial.form.step, trial.form.arguments(trial.state, batch, trial.key))
    except Exception as error:
        reason = f"the step cannot be compiled as a whole: {first_line(error)}"
        return [
            Check("traffic", "full batch", SKIP, reason),
            Check("redundant work", "full batch", SKIP, reason),
        ]
    work = _work(trial, batch, step)
    return [_traffic(step, trial.replicas, gradient_bytes, work), work]


def _compiled(function: Any, arguments: tuple[Any, ...]) -> CompiledStep:
    lowerable = function if hasattr(function, "lower") else jax.jit(function)
    return inspect(lowerable.lower(*arguments).compile())


def _traffic(step: CompiledStep, replicas: int, gradient_bytes: int, work: Check) -> Check:
    case = "full batch"
    moved = sum(each.bytes for each in step.collectives)
    listed = ", ".join(f"{each.count} {each.kind}" for each in step.collectives)
    figures = {
        "collectives": {
            each.kind: {"count": each.count, "bytes": each.bytes} for each in step.collectives
        },
        "bytes": moved,
        "gradient_bytes": gradient_bytes,
    }
    if replicas > 1 and not any(each.kind in _REDUCTIONS for each in step.collectives):
        found = f"nothing is reduced over {replicas} replicas"
        if work.verdict == FAIL:  # nothing to reduce
            return Check("traffic", case, NOTE, found, "see redundant work", figures)
        cause = "the replicas never exchange anything: apply lax.pmean to the gradient"
        return Check("traffic", case, FAIL, found, cause, figures)
    share = moved / max(gradient_bytes, 1)
    found = f"{listed or 'nothing'}: {moved:,} bytes, {share:.2f} times one gradient"
    if moved <= 1.1 * gradient_bytes + _SLACK_BYTES:
        return Check("traffic", case, PASS, found, "", figures)
    cause = (
        "more than one gradient is reduced: also statistics or activations, the same value twice, "
        "or every micro-batch separately (reduce once, after the last)"
    )
    return Check("traffic", case, NOTE, found, cause, figures)


def _work(trial: Trial, batch: PyTree, step: CompiledStep) -> Check:
    """Compare the FLOPs on a device with its share of the work.

    The share is the larger of an N-th of one device's FLOPs (for a loss that compares each row with
    all others) and one device's FLOPs on an N-th of the rows (for an optimizer that multiplies
    matrices, as every replica does).
    """
    case, N, rows = "full batch", trial.replicas, row_count(batch)

    def of_one(batch: PyTree) -> int:
        return _compiled(trial.reference, arguments_of(trial.state, batch, trial.key)).flops

    try:
        whole = of_one(batch)
        share = whole / N
        if step.flops > REDUNDANT * share:
            share = max(share, of_one(take(batch, np.arange(rows // N))))
    except Exception as error:
        reason = f"the reference cannot be compiled as a whole: {first_line(error)}"
        return Check("redundant work", case, SKIP, reason)
    if not share or not step.flops:
        return Check("redundant work", case, SKIP, "the programs have no matrix products to count")
    times = step.flops / share
    figures = {"flops_per_device": step.flops, "flops_single": whole, "replicas": N}
    found = f"{step.flops:,} FLOPs on each of {N} devices: {times:.2f} times its share"
    return redundant_work(case, found, times, N, EVERYTHING.format(N), figures)


def redundant_work(
    case: str,
    found: str,
    times: float,
    split: int,
    cause: str,
    figures: dict[str, Any],
    *,
    most: float = REDUNDANT,
) -> Check:
    """Return the row on FLOPs that are `times` a device's share of work split over `split` devices.

    `cause` explains why each of these devices would compute everything.
    """
    if times <= most:
        return Check("redundant work", case, PASS, found, "", figures)
    if split > 1 and times >= ALL * split:
        return Check("redundant work", case, FAIL, found, cause, figures)
    found += ": some products do not depend on the rows or are not split; each device repeats them"
    return Check("redundant work", case, NOTE, found, "", figures)


EVERYTHING = (
    "every device computes the whole batch: it is replicated, not split over {} devices; give the "
    'batch the sharding P("data") (in_shardings, or jax.device_put)'
)


def gradient_bytes(state: PyTree) -> int:
    """Return the bytes of one gradient: the floats of a state without the optimizer state.

    Parameters are leaves under a name like "params" or "model"; if there are none, all floats that
    are not under a name used only by optimizers and BatchNorm.
    """
    floats = {
        jax.tree_util.keystr(path).lower(): np.size(leaf) * leaf.dtype.itemsize
        for path, leaf in jax.tree_util.tree_leaves_with_path(state)
        if hasattr(leaf, "dtype") and jax.numpy.issubdtype(leaf.dtype, jax.numpy.floating)
    }
    own = ("opt_state", "stats", "['mu']", ".mu", ".nu", "trace", "momentum", "velocity")
    trained = {path: size for path, size in floats.items() if not any(each in path for each in own)}
    named = {path: size for path, size in trained.items() if "param" in path or "model" in path}
    if named:
        return sum(named.values())
    return sum(trained.values()) if trained else sum(floats.values())
