"""Check the compiled program of a hand-written step: reductions and redundant work."""

import contextlib
from typing import Any

import jax
import numpy as np

from replicax.analysis.compiled import CompiledStep, inspect
from replicax.core.ground.leaves import PyTree
from replicax.text.checks import FAIL, SKIP, Check
from replicax.text.wording import first_line
from replicax.verify.batch_rows import rows_of_batch, take
from replicax.verify.program_judge import (
    NO_PRODUCTS,
    REDUNDANT,
    STEP_EVERYTHING,
    judge_step_traffic,
    judge_work,
)
from replicax.verify.reduced import check_reduced, unreduced
from replicax.verify.trial import Trial, arguments_of

_CASE = "full batch"


def program_checks(trial: Trial, batch: PyTree, gradient_bytes: int) -> list[Check]:
    """Return the rows on traffic and redundant work of the step on one batch."""
    try:
        compiled = _compiled(trial.form.step, trial.form.arguments(trial.state, batch, trial.key))
    except Exception as error:
        reason = f"the step cannot be compiled as a whole: {first_line(error)}"
        return [Check(subject, _CASE, SKIP, reason) for subject in ("traffic", "redundant work")]
    step = inspect(compiled)
    work = _work(trial, batch, step)
    judged = judge_step_traffic(
        step.collectives, trial.replicas, gradient_bytes, repeats=work.verdict == FAIL
    )
    figures = {
        "collectives": {
            each.kind: {"count": each.count, "bytes": each.bytes} for each in step.collectives
        },
        "bytes": sum(each.bytes for each in step.collectives),
        "gradient_bytes": gradient_bytes,
    }
    reduced = []
    with contextlib.suppress(Exception):  # compiled by another way than jit
        checked = ("state",) if trial.form.state_stacked else ()
        found = unreduced(compiled, trial.state, checked=checked)
        reduced = [] if found is None or work.verdict == FAIL else [check_reduced(found, _CASE)]
    return [*reduced, Check("traffic", _CASE, *judged, figures), work]


def _compiled(function: Any, arguments: tuple[Any, ...]) -> jax.stages.Compiled:
    lowerable = function if hasattr(function, "lower") else jax.jit(function)
    compiled: jax.stages.Compiled = lowerable.lower(*arguments).compile()
    return compiled


def _work(trial: Trial, batch: PyTree, step: CompiledStep) -> Check:
    """Compare the FLOPs on a device with its share of the work.

    The share is the larger of an N-th of one device's FLOPs (for a loss that compares each row with
    all others) and one device's FLOPs on an N-th of the rows (for an optimizer that multiplies
    matrices, as every replica does).
    """
    N, rows = trial.replicas, rows_of_batch(batch)

    def of_one(batch: PyTree) -> int:
        arguments = arguments_of(trial.state, batch, trial.key)
        return inspect(_compiled(trial.reference, arguments)).flops

    try:
        whole = of_one(batch)
        share = whole / N
        if step.flops > REDUNDANT * share:
            share = max(share, of_one(take(batch, np.arange(rows // N))))
    except Exception as error:
        reason = f"the reference cannot be compiled as a whole: {first_line(error)}"
        return Check("redundant work", _CASE, SKIP, reason)
    if not share or not step.flops:
        return Check("redundant work", _CASE, SKIP, NO_PRODUCTS)
    times = step.flops / share
    text = f"{step.flops:,} FLOPs on each of {N} devices: {times:.2f} times its share"
    verdict, more, cause = judge_work(times, N, 1, STEP_EVERYTHING.format(N))
    figures = {"flops_per_device": step.flops, "flops_single": whole, "replicas": N}
    return Check("redundant work", _CASE, verdict, text + more, cause, figures)


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
