"""One pipeline stage of a replica: forward and backward passes of micro-batches by tick.

All stages run one compiled loop over ticks. In a tick a stage computes the forward pass of one
micro-batch, or nothing, and then the backward pass of one, or nothing. For two stages and three
micro-batches, `F1` and `B1` being the passes of micro-batch 1:

    1f1b      tick 0   1       2       3       4
    stage 0   F0       F1      F2 B0   B1      B2
    stage 1            F0 B0   F1 B1   F2 B2

    gpipe     tick 0   1       2       3       4       5       6       7
    stage 0   F0       F1      F2                      B0      B1      B2
    stage 1            F0      F1      F2      B0      B1      B2

Stage s computes the forward pass of micro-batch n in tick n + s, as the carry needs one tick from
stage to stage. Backward passes begin at the last stage in tick `turn`, here 1 and 4, and the
cotangent of the carry needs one tick from stage to stage too: `turn` + (stages - 1 - s) + n.

Micro-batch 1 in `1f1b`: in tick 1 stage 0 computes the part before the scan and its layers, and
keeps the residuals in slot 1 of a ring. In tick 2 stage 1 computes its layers from that carry, the
rest of the loss and its gradient, and the backward pass of its layers. In tick 3 stage 0 computes
the backward pass of its own.

The ring has as many slots as micro-batches that may be between their passes: here 3 in both
schedules, and with eight micro-batches 3 in `1f1b` and 8 in `gpipe`. In `1f1b` stage 0 keeps
micro-batch n from tick n to tick n + 2, and micro-batch n + 3 takes its slot in the next.
"""

import dataclasses
from collections.abc import Callable
from functools import cached_property, partial
from itertools import compress
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from replicax.core.data.batch import Batch
from replicax.core.ground.leaves import PyTree, divided, is_random_key, merged, numbers
from replicax.core.ground.precision import to_sum
from replicax.core.jaxprs.jaxpr import only
from replicax.core.jaxprs.row_dependence import follow
from replicax.core.jaxprs.row_rules import MIXED
from replicax.core.models.definition import CallContext
from replicax.core.pipeline.split_at_scan import StageParts
from replicax.core.placement.mesh import STAGE
from replicax.core.placement.pipeline_schedules import SCHEDULES
from replicax.core.step.accumulate import folded, zeros_like
from replicax.core.step.base import StepSums
from replicax.core.step.loss import WeightedSum
from replicax.core.step.objective import differentiated, only_read, restored, summed

Arrays = list[jax.Array]
WeightedSums = dict[str, WeightedSum]


@dataclasses.dataclass(frozen=True)
class Stage:
    """One stage of a replica, and its inputs."""

    parts: StageParts
    structure: Any
    """Treedef of the loss's sums."""
    stages: int
    micro_batches: int
    index: jax.Array
    """Index of the stage, int32 `[]`."""
    params: PyTree
    """The layers of this stage, and all parameters outside the layers."""
    extras: PyTree
    rows: Batch
    """The replica's rows, `[micro_batches, rows, ...]`."""
    context: CallContext
    """Includes the replica's key."""

    def forward_sums(self) -> WeightedSums:
        """Return the sums over the replica's rows on the last stage, 0 on the others."""

        def tick(carried: tuple[Arrays, WeightedSums], time: jax.Array) -> tuple[Any, None]:
            received, total = carried
            number = time - self.index

            def work() -> tuple[Arrays, WeightedSums]:
                sent = self.own_layers(self.params, received, number)
                return sent, lax.cond(
                    self._is_last,
                    lambda: _add(total, self.rest(self.params, sent, number)),
                    lambda: total,
                )

            # Stages send outside of the cond, since all of them take part in it in every tick, also
            # idle ones. What these send is not read: the receiver is idle in the next tick.
            sent, total = lax.cond(self._has(number), work, lambda: (received, total))
            return (self._shift(sent, 1), total), None

        ticks = jnp.arange(self.micro_batches + self.stages - 1)
        (_, total), _ = lax.scan(tick, (self._no_carry, self._no_sums), ticks)
        return total

    def step_sums(self, read: tuple[bool, ...] | None, schedule: str) -> StepSums:
        """Return these sums and this stage's part of the gradient for the parameters in `read`."""
        wanted = only_read(self.params, read)
        whole = partial(restored, params=self.params, read=read)

        together = partial(merged, flags=self._floating)

        # The loss of a micro-batch is two functions, as their derivatives are taken at different
        # times: `layers` by each stage, whose residuals wait in the ring for the cotangent from the
        # next stage, and `loss`, the rest, by the last stage, when it begins a backward pass.
        # Integers in the carry, such as masks, travel with it, and have no cotangent.
        def layers(wanted: PyTree, given: tuple[Arrays, jax.Array]) -> tuple[Arrays, Arrays]:
            return divided(self.own_layers(whole(wanted), *given), self._floating)

        def loss(wanted: PyTree, floats: Arrays, others: Arrays, number: jax.Array) -> Any:
            weighted = self.rest(whole(wanted), together(floats, others), number)
            return differentiated(weighted, self.context), weighted

        later = Later(layers, wanted, (self._no_carry, jnp.int32(0)))
        turn = SCHEDULES[schedule](self.stages, self.micro_batches)
        slots = min(turn + self.stages, self.micro_batches)

        def tick(carried: Any, time: jax.Array) -> tuple[Any, None]:
            received, cotangent, ring, sums = carried
            # The micro-batches whose forward and backward passes are due; see `_has`.
            number, back = time - self.index, time - turn - (self.stages - 1 - self.index)

            def forward() -> tuple[Arrays, Any]:
                (floats, others), kept = later.forward(wanted, (received, number))
                return together(floats, others), (floats, others, kept)

            def backward() -> tuple[Arrays, StepSums]:
                floats, others, kept = _slot(ring, back % slots)

                def at_the_end() -> tuple[Arrays, StepSums]:
                    gradients, weighted = jax.grad(loss, argnums=(0, 1), has_aux=True)(
                        wanted, floats, others, back
                    )
                    return gradients[1], _add(sums, _as_sums(gradients[0], weighted))

                # The last stage makes the first cotangent; the others have received theirs.
                own, total = lax.cond(self._is_last, at_the_end, lambda: (cotangent, sums))
                gradient, (by_carry, _) = later.backward(wanted, kept, own)
                before, _ = divided(by_carry, self._floating)
                return before, _add(total, _as_sums(gradient, self._no_sums))

            # Without a forward pass the slot's own values are written back: the cond returns only
            # one slot, not the ring. This comes before `backward` reads a slot, since in `1f1b`
            # the last stage computes both passes of a micro-batch in one tick.
            idle = partial(_slot, ring, number % slots)
            sent, kept = lax.cond(self._has(number), forward, lambda: (received, idle()))
            ring = jax.tree.map(
                lambda all_, one: lax.dynamic_update_index_in_dim(all_, one, number % slots, 0),
                *(ring, kept),
            )
            cotangent, sums = lax.cond(self._has(back), backward, lambda: (cotangent, sums))
            return (self._shift(sent, 1), self._shift(cotangent, -1), ring, sums), None

        floats, others = divided(self._no_carry, self._floating)
        kept = jax.eval_shape(later.forward, wanted, (self._no_carry, jnp.int32(0)))[1]
        ring = jax.tree.map(
            lambda leaf: jnp.zeros((slots, *leaf.shape), leaf.dtype), (floats, others, kept)
        )
        nothing = _as_sums(jax.tree.map(jnp.zeros_like, wanted), self._no_sums)
        ticks = jnp.arange(turn + self.micro_batches + self.stages - 1)
        carried, _ = lax.scan(tick, (self._no_carry, floats, ring, nothing), ticks)
        sums: StepSums = carried[-1]
        return sums

    def own_layers(self, params: PyTree, received: Arrays, number: jax.Array) -> Arrays:
        """Return the carry of a micro-batch after this stage's layers, from the carry before."""
        inputs = self._inputs(params, number)
        carry = lax.cond(self.index == 0, lambda: self.parts.first(inputs), lambda: received)
        return self.parts.through(inputs, carry, self.index, self.stages)

    def rest(self, params: PyTree, carry: Arrays, number: jax.Array) -> WeightedSums:
        """Return the loss sums of a micro-batch from its carry after all layers."""
        found = self.parts.rest(self._inputs(params, number), carry)
        sums: WeightedSums = jax.tree.unflatten(self.structure, found)
        return sums

    def _inputs(self, params: PyTree, number: jax.Array) -> list[Any]:
        rows = self.rows.map_rows(partial(_at, number))
        key = folded(self.context.key, number)
        return jax.tree.leaves((params, self.extras, rows, key, self.context.step))

    @property
    def _is_last(self) -> jax.Array:
        return self.index == self.stages - 1

    def _has(self, number: jax.Array) -> jax.Array:
        return (number >= 0) & (number < self.micro_batches)

    def _shift(self, arrays: Arrays, by: int) -> Arrays:
        """Send to the stage `by` positions ahead; stages without a sender receive 0."""
        pairs = [(stage, stage + by) for stage in range(self.stages)]
        within = [pair for pair in pairs if 0 <= pair[1] < self.stages]
        return [lax.ppermute(array, STAGE, within) for array in arrays]

    @cached_property
    def _no_carry(self) -> Arrays:
        found: Arrays = zeros_like(self.parts.carried)
        return found

    @cached_property
    def _no_sums(self) -> WeightedSums:
        sums: WeightedSums = jax.tree.unflatten(self.structure, zeros_like(self.parts.returned))
        return sums

    @cached_property
    def _floating(self) -> list[bool]:
        """Return which arrays of a carry are floats; the others have no gradient."""
        return [bool(jnp.issubdtype(leaf.dtype, jnp.inexact)) for leaf in self.parts.carried]


def _as_sums(gradient: PyTree, weighted: WeightedSums) -> StepSums:
    return StepSums(jax.tree.map(to_sum, gradient), summed(weighted))


def _add(one: Any, other: Any) -> Any:
    return jax.tree.map(jnp.add, one, other)


def _at(number: jax.Array, leaf: jax.Array) -> jax.Array:
    found: jax.Array = lax.dynamic_index_in_dim(leaf, number, keepdims=False)
    return found


def _slot(ring: PyTree, number: jax.Array) -> Any:
    return jax.tree.map(partial(_at, number), ring)


class Later:
    """A function whose forward and backward passes run in different iterations of a compiled loop.

    `function(wanted, given) -> (outputs, more)` is differentiated with respect to `wanted` and the
    floats in `given`, inputs that change between iterations; `more` is auxiliary. Only residuals
    that depend on `given` are kept. Those that depend only on the parameters, such as their casts
    and transposes, are the same in every iteration and are recomputed.

    For `jnp.tanh(x @ w.astype(bfloat16))`, differentiated by `w` and `x`, it keeps three arrays of
    the shape of rows, `x`, the tanh and 1 minus it; `backward` casts `w` again.
    """

    def __init__(
        self, function: Callable[[PyTree, Any], tuple[Any, Any]], wanted: PyTree, given: PyTree
    ) -> None:
        self._vjp: Any = None
        self._result: Any

        def forward(wanted: PyTree, given: PyTree) -> Any:
            outputs, vjp, more = jax.vjp(function, wanted, given, has_aux=True)
            kept, self._vjp = jax.tree.flatten(vjp)
            return (outputs, more), kept

        # Traced once: the forward pass is this jaxpr without the residuals that can be recomputed,
        # and `backward` begins with only these. `self._vjp`, noted while tracing, is the treedef of
        # a `jax.vjp` function, to be filled with residuals.
        closed, found = jax.make_jaxpr(forward, return_shape=True)(wanted, given)
        outputs, kept = found
        self._result = jax.tree.structure(outputs)
        count, params = self._result.num_leaves, len(jax.tree.leaves(wanted))
        # The row rules, with `given` as the rows, tell what depends on `given` at all.
        places = follow(closed, [None] * params + [MIXED] * len(jax.tree.leaves(given)))
        self._changes = [place is not None for place in places[count:]]
        self._keys = [
            jax.random.key_impl(leaf) if is_random_key(leaf) else None
            for leaf, changes in zip(kept, self._changes, strict=True)
            if changes
        ]
        self._forward, self._reads = only(closed, [True] * count + self._changes)
        self._again, self._reads_again = only(
            closed, [False] * count + [not changes for changes in self._changes]
        )

    def forward(self, wanted: PyTree, given: PyTree) -> tuple[tuple[Any, Any], Arrays]:
        """Return `(outputs, more)` and the residuals to keep, with random keys as integers."""
        found = self._forward(*compress(jax.tree.leaves((wanted, given)), self._reads))
        count = self._result.num_leaves
        kept = [numbers(leaf) for leaf in found[count:]]
        return jax.tree.unflatten(self._result, found[:count]), kept

    def backward(self, wanted: PyTree, kept: Arrays, cotangents: Any) -> tuple[PyTree, Any]:
        """Return the cotangents of `wanted` and `given` from those of `outputs`."""
        restored = (
            leaf if impl is None else jax.random.wrap_key_data(leaf, impl=impl)
            for leaf, impl in zip(kept, self._keys, strict=True)
        )
        again = self._again(*compress(jax.tree.leaves(wanted), self._reads_again))
        leaves = merged(restored, again, self._changes)
        found: tuple[PyTree, Any] = jax.tree.unflatten(self._vjp, leaves)(cotangents)
        return found
