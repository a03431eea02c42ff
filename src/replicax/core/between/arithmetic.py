"""The arithmetic of a round: what an island sends, how it is added, and the outer step.

Every function sees one island, and is compiled in the same way whatever carries the payloads.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

from replicax.core.between.rounds import Rounds
from replicax.core.ground.leaves import PyTree
from replicax.core.ground.train_state import Metrics, TrainState
from replicax.core.ground.vectors import as_blocks, size_in_blocks
from replicax.core.modes.exact.fixed_tree import float_sums, with_means
from replicax.core.step.base import Apply, StepSums
from replicax.core.step.loss import LOSS, WeightedSum
from replicax.core.step.optimizer import Updater

SUMS = "sums of the step"
"""Entry of an inner step's metrics, with its `WeightedSum`s."""
_EXACT = 4
"""Numbers before the model state: the weight, the loss and its weight, and 1 per island."""


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["inner", "residual", "weights", "loss"],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class IslandState:
    """State of one island, which others do not have; stacked if all are those of one job."""

    inner: TrainState
    """The state that its steps update."""
    residual: tuple[jax.Array, ...]
    """float32 vector of each fragment: what earlier rounds did not send; empty if none is lost."""
    weights: jax.Array
    """float32 `[fragments]`: total weight of its rows since each was sent."""
    loss: WeightedSum
    """Sums of the loss over its rows in this round."""


Counts = tuple[jax.Array, WeightedSum]
"""The `weights` and the `loss` of an `IslandState`."""


@dataclasses.dataclass(frozen=True)
class Weighing:
    """Wraps the optimizer part of a step to return the sums, too; 0 if `around` skips the step."""

    around: Callable[[Apply], Apply] | None = None

    def __call__(self, apply: Apply) -> Apply:
        def weighed(
            state: TrainState, total: StepSums, *rest: PyTree
        ) -> tuple[TrainState, Metrics]:
            after, told = apply(state, total, *rest)
            sums: Any = total.weighted
            return after, {**told, SUMS: sums}

        return weighed if self.around is None else self.around(weighed)


@dataclasses.dataclass(frozen=True)
class Arithmetic:
    """The functions of a round for parameters of some structure."""

    rounds: Rounds
    trained: tuple[bool, ...]
    """Whether each parameter trains; the others are not sent."""

    def fragment(self, params: PyTree, number: int) -> PyTree:
        """Return the parameters of a fragment, as large as the others; the rest is masked."""
        leaves, structure = jax.tree.flatten(params)
        of = iter(self.rounds.dealt([leaf.size for leaf in self._sent(params)]))
        no_leaf: Any = optax.MaskedNode
        each = [
            leaf if trains and next(of) == number else no_leaf()
            for leaf, trains in zip(leaves, self.trained, strict=True)
        ]
        return jax.tree.unflatten(structure, each)

    def payload_bytes(self, params: PyTree) -> int:
        """Return the bytes that an island encodes in a round."""
        return sum(self.rounds.payload_bytes(self._sent(params)))

    def _sent(self, params: PyTree) -> list[Any]:
        leaves = jax.tree.leaves(params)
        return [leaf for leaf, trains in zip(leaves, self.trained, strict=True) if trains]

    def merged(self, params: PyTree, part: PyTree) -> PyTree:
        """Return `params` with those of a fragment."""

        def is_masked(leaf: Any) -> bool:
            return isinstance(leaf, optax.MaskedNode)

        return jax.tree.map(
            lambda new, old: old if is_masked(new) else new, part, params, is_leaf=is_masked
        )

    def outer(self, state: TrainState, islands: int | None) -> TrainState:
        """Return the outer state before the first round, of an island's first `state`.

        With a number of `islands`, it has the own states of all, stacked.
        """
        own = self.island_state(state)
        if islands is not None:
            own = jax.tree.map(
                lambda leaf: jnp.broadcast_to(leaf, (islands, *jnp.shape(leaf))), own
            )
        return dataclasses.replace(
            state,
            opt_state=self.outer_state(state.params),
            losses=(),
            reduction=(),
            scale=(),
            islands=own,
        )

    def outer_state(self, params: PyTree) -> tuple[PyTree, ...]:
        """Return the outer optimizer's state of each fragment, before the first round."""
        assert self.rounds.outer is not None
        numbers = range(self.rounds.fragments)
        return tuple(self.rounds.outer.init(self.fragment(params, n)) for n in numbers)

    def island_state(self, inner: TrainState) -> IslandState:
        """Return an island's own state before the first round."""
        count = self.rounds.fragments
        sizes = [self._size(inner.params, n) for n in range(count)]
        exact = self.rounds.codec.error == 0
        return IslandState(
            # Copied, as they are donated apart from the outer ones.
            jax.tree.map(jnp.copy, inner),
            () if exact else tuple(jnp.zeros(size) for size in sizes),
            jnp.zeros(count),
            WeightedSum(jnp.zeros(()), jnp.zeros(())),
        )

    def counted(self, own: Counts, metrics: Metrics) -> Counts:
        """Return the counts after an inner step."""
        one = WeightedSum(metrics[LOSS], jnp.ones(()))  # a custom step has no sums
        sums: Any = metrics.get(SUMS, {LOSS: one})
        loss, (weights, so_far) = sums[LOSS], own
        total = WeightedSum(so_far.total + loss.total, so_far.weight + loss.weight)
        return weights + loss.weight, total

    def sent(
        self, own: IslandState, params: PyTree, number: int
    ) -> tuple[tuple[tuple[jax.Array, ...], Counts], jax.Array, jax.Array]:
        """Return what changes in `own`, the payload of a fragment, and the numbers sent exactly.

        What changes are the residual and the counts.
        """
        codec, residual, loss = self.rounds.codec, list(own.residual), own.loss
        outer, inner = (
            as_blocks(self.fragment(of, number))[0] for of in (params, own.inner.params)
        )
        difference = outer - inner
        if residual:
            difference = (self.rounds.decay or 0) * residual[number] + difference
        payload = codec.encode(difference)
        if residual:
            residual[number] = difference - codec.decode(payload, difference.size)
        told = [own.weights[number], loss.total, loss.weight, 1.0]
        exact = jnp.stack([jnp.asarray(each, jnp.float32) for each in told])
        if number == 0:
            floats = float_sums(own.inner.extras)
            exact = jnp.concatenate([exact, *[leaf.astype(jnp.float32).ravel() for leaf in floats]])
            loss = jax.tree.map(jnp.zeros_like, loss)
        counts = own.weights.at[number].set(0), loss
        return (tuple(residual), counts), payload, exact

    def nothing(self, params: PyTree, extras: PyTree, number: int) -> tuple[jax.Array, jax.Array]:
        """Return zeros, to which the fragment of each island is added."""
        floats = sum(leaf.size for leaf in float_sums(extras)) if number == 0 else 0
        return jnp.zeros(self._size(params, number)), jnp.zeros(_EXACT + floats)

    def added(
        self, sums: tuple[jax.Array, jax.Array], payload: jax.Array, exact: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Add what one island has sent, the difference times the weight of its rows."""
        total, numbers = sums
        return total + exact[0] * self.rounds.codec.decode(payload, total.size), numbers + exact

    def stepped(
        self,
        params: PyTree,
        opt_state: tuple[PyTree, ...],
        extras: PyTree,
        sums: tuple[jax.Array, jax.Array],
        number: int,
    ) -> tuple[PyTree, tuple[PyTree, ...], PyTree, jax.Array]:
        """Return outer parameters, optimizer states, model state, and the loss of the round."""
        assert self.rounds.outer is not None
        total, numbers = sums
        part = self.fragment(params, number)
        weight = jnp.where(numbers[0] > 0, numbers[0], 1)
        gradient = as_blocks(part)[1](total / weight)
        updates, after = self.rounds.outer.update(gradient, opt_state[number], part)
        params = self.merged(params, optax.apply_updates(part, updates))
        states = (*opt_state[:number], after, *opt_state[number + 1 :])
        if number == 0:
            extras = self._averaged(extras, numbers)
        return params, states, extras, numbers[1] / numbers[2]

    def taken(
        self, own: tuple[PyTree, PyTree], params: PyTree, extras: PyTree, number: int
    ) -> tuple[PyTree, PyTree]:
        """Return an island's `own` parameters and model state, once an outer step takes effect."""
        mix, (own_params, own_extras) = self.rounds.mix, own

        def mixed(new: jax.Array, old: jax.Array) -> jax.Array:
            return mix * old + (1 - mix) * new if mix else jnp.copy(new)

        part = jax.tree.map(mixed, *(self.fragment(of, number) for of in (params, own_params)))
        return self.merged(own_params, part), jax.tree.map(
            jnp.copy, own_extras if number else extras
        )

    def _size(self, params: PyTree, number: int) -> int:
        return size_in_blocks(jax.tree.leaves(self.fragment(params, number)))

    def _averaged(self, extras: PyTree, numbers: jax.Array) -> PyTree:
        floats, start = [], _EXACT
        for leaf in float_sums(extras):
            floats.append(numbers[start : start + leaf.size].reshape(leaf.shape))
            start += leaf.size
        return with_means(extras, floats, numbers[3])


def arithmetic_of(rounds: Rounds, updater: Updater, params: PyTree) -> Arithmetic:
    """Return the arithmetic for these parameters, of which not all may train."""
    everything = (True,) * len(jax.tree.leaves(params))
    return Arithmetic(rounds, tuple(updater.read or everything))
