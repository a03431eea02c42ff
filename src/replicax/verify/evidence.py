"""The evidence about a step that gives other numbers than one device."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from replicax.verify.difference import Leaves


@dataclasses.dataclass(frozen=True)
class Hypothesis:
    """A cause in words, and the results that it would give."""

    text: str
    results: Callable[[], Leaves]


@dataclasses.dataclass(frozen=True)
class Evidence:
    """A step's results, those expected, and the means to try other explanations.

    All results are by path, as `difference.leaves` and `difference.changes` give them: gradients,
    or what the step added to each leaf of the state (changes, not values: factors are seen in
    them), with the metrics beside them. The loss is known by its path, which holds "loss".
    """

    found: Leaves
    expected: Leaves
    bounds: Leaves
    rows: int
    """Rows of the global batch. Replica i has the i-th of `replicas` equal runs of them."""
    replicas: int
    micro_batches: int = 1
    """Parts that each replica's rows are computed in."""
    weights: np.ndarray | None = None
    """[rows], the weight of each row in the mean; None where all weigh the same."""
    on_rows: Callable[[np.ndarray], Leaves] | None = None
    """The reference's results from the rows of these indices alone."""
    of_replica: Callable[[int], Leaves] | None = None
    """Results that one replica holds, where they do not all hold the same."""
    values: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)
    """By path, the values before the step of leaves whose changes are compared; with them a factor
    is seen beside weight decay, which it does not touch."""
    others: Sequence[Hypothesis] = ()
    """More hypotheses, of the caller's own; tried first."""

    @functools.cached_property
    def own(self) -> list[Leaves]:
        """The reference's results on the rows of each replica."""
        assert self.on_rows is not None
        blocks = np.arange(self.rows).reshape(self.replicas, -1)
        return [self.on_rows(block) for block in blocks]
