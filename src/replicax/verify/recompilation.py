"""A second batch of the same shape, and the padded last one, compile nothing."""

import dataclasses

import jax
import numpy as np

from replicax.checks import FAIL, PASS, Check
from replicax.core.batch import Batch
from replicax.verify.compilations import counted_compilations
from replicax.verify.subject import Subject


def check_recompilation(subject: Subject, *, padded: bool) -> Check:
    """Run a step on batch after batch, each with the state that the one before gave.

    Args:
        subject: what is verified.
        padded: whether a padded batch is among them.
    """
    dp, case = subject.parallel(subject.own), subject.own
    others = [subject.some(np.roll(np.arange(subject.rows), 1))]
    others += [subject.padded] if padded else []
    placed = [subject.batch_on(case, dataclasses.replace(batch)) for batch in others]
    state, _ = dp.step(subject.placed(case, subject.state), _own(subject))
    with counted_compilations() as seen:
        for batch in placed:
            state, _ = dp.step(state, batch)
        jax.block_until_ready(state)
    text = "a second batch" + (" and a padded one" if padded else "")
    if not seen.count:
        return Check(
            "recompilation", str(case), PASS, f"{text} compile{'' if padded else 's'} nothing"
        )
    text = f"{text} compiled {', '.join(sorted(set(seen.names)))}"
    return Check("recompilation", str(case), FAIL, text, CAUSE, {"compiled": seen.names})


CAUSE = (
    "what the step returns has other dtypes or shapes than what it takes, or the loss depends on "
    "something that changes from call to call"
)


def _own(subject: Subject) -> Batch:
    return subject.batch_on(subject.own, subject.full)
