"""Check that a reduction with error feedback keeps whatever it does not send."""

import itertools
from collections.abc import Iterator

import jax
import numpy as np

from replicax.core.data.batch import Batch
from replicax.text.checks import FAIL, PASS, Check
from replicax.verify.difference import Leaves, leaf_differences, leaves
from replicax.verify.program_trial import ProgramTrial


def check_residual(trial: ProgramTrial, batch: Batch) -> Iterator[Check]:
    """Yield a row for a reduction that can tell what it has not sent.

    In the first step of a residual, this and the gradient add up to the gradient of one device,
    within the rounding of float32.
    """
    subject, case = trial.subject, trial.case
    tell = getattr(subject.parallel(case).reduction, "unsent", None)
    if tell is None or case.devices == 1:
        return
    after, _ = subject.run(case, batch)
    gradient, structure = jax.tree.flatten(jax.device_get(after.opt_state[0]))
    trained = jax.tree.leaves(subject.trained)
    sent = list(itertools.compress(gradient, trained))
    kept = iter(tell(jax.device_get(after.reduction), sent))
    whole = [
        leaf + np.asarray(next(kept)) if is_trained else leaf
        for leaf, is_trained in zip(gradient, trained, strict=True)
    ]
    found = _named(jax.tree.unflatten(structure, whole))
    expected = {path: each for path, each in trial.expected([batch]).items() if path in found}
    bounds = trial.plain_bounds([batch], batch.size)
    apart = leaf_differences(found, expected, bounds)
    share = _norm(_named(jax.tree.unflatten(structure, gradient)), expected) / _norm(expected)
    figures = {"leaves": len(expected), "differing": len(apart), "share": share}
    if apart:
        yield Check("residual", str(case), FAIL, f"{apart[0]}", LOST, figures)
        return
    text = f"{share:.1e} of the gradient is not sent yet, and nothing is lost"
    yield Check("residual", str(case), PASS, text, "", figures)


def _named(gradient: object) -> Leaves:
    return {f"gradient{path}": value for path, value in leaves(gradient).items()}


def _norm(one: Leaves, other: Leaves | None = None) -> float:
    """Return the norm of all leaves, or of their difference."""
    squares = (
        np.sum(np.abs(leaf - (other[path] if other else 0)) ** 2) for path, leaf in one.items()
    )
    return float(np.sqrt(sum(squares)))


LOST = (
    "the gradient plus the residuals of all replicas is another gradient: what the reduction does "
    "not send is lost, or sent twice"
)
