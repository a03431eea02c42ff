"""The lines that a run with rounds prints about them."""

import jax
import jax.numpy as jnp

from replicax.core.between.arithmetic import arithmetic_of
from replicax.core.between.rounds import MOMENTUM, OuterSGD
from replicax.core.data_parallel import DataParallel
from replicax.core.ground.train_state import TrainState
from replicax.text.table import labelled
from replicax.text.wording import counted, size_text

FEW_ROUNDS = 100
"""With fewer, an outer momentum of 0.9 does harm: see docs/slow-links.md."""
FEW_SPARSE_ROUNDS = 1_000
"""With fewer, a codec that sends few values costs much loss: it sends each 16 times in so many."""


def rounds_lines(dp: DataParallel, state: TrainState) -> list[str]:
    """Return what a round is, and what an island sends in it; nothing without rounds."""
    rounds = dp.configuration.rounds
    if rounds is None or rounds.sends_gradients:
        return []
    arithmetic = arithmetic_of(rounds, dp.program(state).updater, state.params)
    peers = dp.job.peers
    count = dp.split.replicas if rounds.axis else 1 if peers is None else peers.count
    outer = rounds.outer if isinstance(rounds.outer, OuterSGD) else "optimizer of your own"
    sent = size_text(arithmetic.payload_bytes(state.params))
    parts = [counted(rounds.every, "step"), rounds.codec.name, f"outer {outer}"]
    if rounds.fragments > 1:
        parts.append(f"{rounds.fragments} fragments")
    if rounds.delay:
        parts.append(f"{counted(rounds.delay, 'step')} later")
    parts += [counted(count, "island"), f"each sends {sent}"]
    return labelled("rounds", " · ".join(parts))


def doubtful_rounds(dp: DataParallel, steps: int | None) -> list[str]:
    """Return a line on each setting that costs loss; `steps` are those of the run, if known."""
    rounds = dp.configuration.rounds
    if rounds is None or rounds.outer is None:
        return []
    doubts, every = list[str](), rounds.every
    if every == 1 and jax.tree.leaves(jax.eval_shape(rounds.outer.init, jnp.zeros(1))):
        doubts.append(
            "every=1 with an outer optimizer that keeps state, the worst choice: use every=30, or "
            "outer=optax.sgd(1.0), or no rounds, as islands then add up the sums of every step"
        )
    if steps is None:
        return doubts
    count = steps // every
    momentum = rounds.outer.momentum if isinstance(rounds.outer, OuterSGD) else 0.0
    if every > 1 and count < FEW_ROUNDS and momentum >= MOMENTUM:
        doubts.append(
            f"{counted(count, 'round')} with outer momentum {momentum:g}, which does harm in "
            f"fewer than {FEW_ROUNDS}: train for longer, or use outer=optax.sgd(0.7, momentum=0.5, "
            "nesterov=True) (--outer-rate 0.7 --outer-momentum 0.5)"
        )
    if every > 1 and count < FEW_SPARSE_ROUNDS and rounds.codec.error >= 1:
        doubts.append(
            f"{counted(count, 'round')} with send={rounds.codec.name!r}, which sends few values "
            f"in each and costs much loss in fewer than {FEW_SPARSE_ROUNDS:,}: train for longer, "
            "or use send='int4'"
        )
    if rest := steps % every:
        doubts.append(
            f"{steps:,} steps are {counted(count, 'round')} of {every} and a last one of {rest}, "
            f"whose outer step is as large: use a multiple of {every}"
        )
    return doubts
