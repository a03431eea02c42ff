"""Check that a loss means the same in evaluation as in training: a mean over rows."""

import contextlib
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from replicax.core.models.definition import CallContext
from replicax.core.step.loss import LOSS, Weighted
from replicax.text.checks import FAIL, Check
from replicax.verify.plain import PlainLoss, plain_means
from replicax.verify.subject import Subject

_NEAR = 1e-3


def check_evaluated(subject: Subject) -> Iterator[Check]:
    """Yield a row if the loss is one number in evaluation, and the sum of those of its rows."""
    objective, state, count = subject.objective, subject.state, subject.rows // 2
    loss = PlainLoss(objective.definition, objective.loss, objective.precision)

    def value(first: int, last: int) -> jax.Array:
        batch = subject.some(np.arange(first, last)).apart()
        context = CallContext(whole=True, only_read=True, step=jnp.int32(0))
        found, _ = loss.returned(state.params, state.extras, batch, context)
        values = found[0] if isinstance(found, tuple) else found
        if jnp.ndim(values.values if isinstance(values, Weighted) else values):
            raise _ByRowError
        mean: jax.Array = plain_means(values)[LOSS]
        return mean

    with contextlib.suppress(Exception):  # a value for each row, or no evaluation without a key
        parts = ((0, 2 * count), (0, count), (count, 2 * count))
        whole, one, other = (float(jax.jit(lambda part=part: value(*part))()) for part in parts)
        if abs(whole - one - other) <= _NEAR * abs(whole) and abs(one + other) > 0:
            text = f"{whole:.4g}, the sum of the losses of both halves of its rows"
            yield Check("parity", "evaluation", FAIL, text, SUM_IN_EVALUATION)


class _ByRowError(Exception):
    """Raised where the loss has a value for each row."""


SUM_IN_EVALUATION = (
    "a loss that is one number counts as the mean of its rows, so an evaluation of sums depends on "
    "the batch size: return one value per row in evaluation, too, or the mean"
)
