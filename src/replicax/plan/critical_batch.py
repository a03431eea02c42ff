"""What a larger batch costs in rows, saves in steps, and asks of the learning rate."""

import math
from dataclasses import dataclass

from replicax.errors import ConfigError


@dataclass(frozen=True)
class BatchCost:
    """Of training to a given loss, against the least possible."""

    steps: float
    """Over the fewest steps, those of an endless batch."""
    rows: float
    """Over the fewest rows, those of the smallest batch."""


def batch_cost(batch_size: float, noise_scale: float) -> BatchCost:
    """Steps and rows that a batch size takes to reach a loss.

    steps = S_min (1 + B_crit/B) and rows = E_min (1 + B/B_crit), so a batch of B_crit takes twice
    the least of both (McCandlish et al. 2018, "An Empirical Model of Large-Batch Training",
    arXiv:1812.06162).

    Args:
        batch_size: rows of a step.
        noise_scale: the gradient noise scale, B_crit, in rows.

    Raises:
        ConfigError: one of them is not positive.
    """
    if not (batch_size > 0 and noise_scale > 0):
        raise ConfigError(
            f"a batch of {batch_size} rows with a noise scale of {noise_scale}: both must be "
            "positive; measure one with `replicax train --measure-noise-scale`"
        )
    return BatchCost(1 + noise_scale / batch_size, 1 + batch_size / noise_scale)


@dataclass(frozen=True)
class LearningRates:
    """The learning rate of one batch size carried over to another."""

    linear: float
    """In proportion to the batch, for SGD with warm-up (Goyal et al. 2017, arXiv:1706.02677)."""
    square_root: float
    """In proportion to its root: for Adam (Malladi et al. 2022, arXiv:2205.10287), and what keeps
    the variance of SGD's steps (Krizhevsky 2014, arXiv:1404.5997)."""


def learning_rates(learning_rate: float, batch_size: float, planned: float) -> LearningRates:
    """Where to start looking for the learning rate of another batch size.

    Both rules hold for batches well below the critical one; beyond it neither does.

    Args:
        learning_rate: that was tuned for `batch_size` rows.
        batch_size: rows of a step there.
        planned: rows of a step planned.

    Raises:
        ConfigError: a batch without rows.
    """
    if batch_size <= 0 or planned <= 0:
        raise ConfigError(f"batches of {batch_size} and {planned} rows; a batch has 1 or more")
    ratio = planned / batch_size
    return LearningRates(learning_rate * ratio, learning_rate * math.sqrt(ratio))
