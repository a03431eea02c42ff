"""Facts about a loss and its model that decide what can be compared with what."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from replicax.core.look import Look
from replicax.verify.devices_asked import devices_asked
from replicax.verify.difference import Leaves, is_float
from replicax.verify.independence import Independence, examine_rows
from replicax.verify.loss_trace import loss_draws_from_a_constant
from replicax.verify.subject import Subject


@dataclasses.dataclass(frozen=True)
class Facts:
    """Seen on one device, or in the program of the loss."""

    repeatable: bool
    """Whether the same step on one device gives the same bits."""
    random: bool
    """Whether training follows from the key: dropout."""
    writes: bool
    """Whether a step changes the model's other arrays: BatchNorm's statistics."""
    constant_key: bool
    """Whether the loss draws random numbers that do not follow from the key."""
    rows: Independence
    takes_padding: bool
    """Whether the loss is the same with padding among the rows, or knows of it."""
    scalars: frozenset[str]
    """Names of what the loss returns as one number for the whole batch, whatever its weights."""
    asked: list[str]
    """Functions that the loss asks for devices with."""


def examine(subject: Subject) -> Facts:
    """Look at the loss and the model on one device."""
    first, second = (subject.measured(subject.single, subject.full) for _ in range(2))
    reseeded = dataclasses.replace(subject.state, seed=np.uint32(int(subject.state.seed) ^ 1))
    other = subject.measured(subject.single, subject.full, reseeded)
    repeatable = same_bits(first, second)
    with devices_asked() as asked:
        look = Look(subject.objective, subject.state, subject.full.apart(), divided=False)
    random = not repeatable or not same_bits(first, other)
    return Facts(
        repeatable,
        repeatable and random,
        any(
            is_float(value) and bool(np.any(value))
            for path, value in first.items()
            if path.startswith("extras")
        ),
        loss_draws_from_a_constant(
            subject.objective, subject.state, jax.tree.map(jnp.asarray, subject.full)
        ),
        examine_rows(subject, look.gathers, random),
        not look.needs_real_rows,
        frozenset(look.scalars),
        asked,
    )


def same_bits(left: Leaves, right: Leaves) -> bool:
    """Whether two results are the same to the last bit."""
    return all(value.tobytes() == right[path].tobytes() for path, value in left.items())
