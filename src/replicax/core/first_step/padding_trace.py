"""Follow what padded rows hold through two traces, if their weights are 0."""

import dataclasses
from collections.abc import Sequence

import jax

from replicax.core.data.batch import Batch
from replicax.core.first_step.examiner import Trace
from replicax.core.ground.train_state import TrainState
from replicax.core.jaxprs.row_counts import GIVEN, Location, Total
from replicax.core.jaxprs.row_dependence import Follow
from replicax.core.jaxprs.row_labels import SUMMED
from replicax.core.jaxprs.row_padding import COUNTED, WEIGHTS, as_padded
from replicax.core.jaxprs.row_rules import MIXED


@dataclasses.dataclass(frozen=True)
class PaddingTrace:
    """The places of what a loss or a step computes; see `replicax.core.jaxprs.row_padding`."""

    outputs: dict[str, Location]
    """By the path of an output."""
    seen: dict[str, list[Location]]
    """By the label of a value."""
    leaks: bool = False
    """Whether a backward pass that code defines may not be 0 where its cotangent is."""

    def opens(self, label: str, *, scalar: bool) -> bool:
        """Whether it is not shown that a value leaves padding out."""
        right = None if scalar else Total(0)
        return any(place and place != right for place in self.seen.get(label, [MIXED]))

    def counts(self, name: str) -> bool:
        """Whether it is shown that a value, or an output, counts padding."""
        return COUNTED in (self.outputs.get(name), *self.seen.get(name, []))


NOTHING_SHOWN = PaddingTrace({}, {})


def padding_trace(
    one: Trace,
    twin: Trace,
    rows: tuple[int, int],
    given: tuple[TrainState, Batch],
    places: Sequence[Location],
    *,
    whole: bool,
) -> PaddingTrace:
    """Follow padding through the traces of all and of real rows alone; may raise `Unlike`.

    `places` are those of the arrays of `given`; `whole`: whether the program sees the whole batch.
    """
    follow = Follow(rows, {SUMMED: GIVEN}, drawn_first=whole, pads=True)
    pairs = zip(jax.tree.leaves(given), places, strict=True)
    mask = given[1].mask
    inputs = [WEIGHTS if leaf is mask else as_padded(place) for leaf, place in pairs]
    found = follow(one.jaxpr, twin.jaxpr, inputs)
    outputs = dict(zip(one.outputs, found, strict=False))
    return PaddingTrace(outputs, follow.seen, follow.leaks)
