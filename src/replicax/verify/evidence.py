"""The evidence about a step that gives other numbers than one device."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from replicax.verify.difference import Leaves, is_float

EXPLAINED = 0.1
"""A hypothesis explains a leaf where at most this share of the difference is left."""
MOST_REPLICAS = 16
"""Runs of the reference on one replica's rows; with more replicas, these are not tried."""


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

    @property
    def divides(self) -> bool:
        """Whether the reference can be run on the rows of each replica."""
        few = 1 < self.replicas <= MOST_REPLICAS
        return self.on_rows is not None and few and self.rows % self.replicas == 0

    @functools.cached_property
    def own(self) -> list[Leaves]:
        """The reference's results on the rows of each replica."""
        assert self.on_rows is not None
        return [self.on_rows(block) for block in np.split(np.arange(self.rows), self.replicas)]

    @property
    def losses(self) -> list[str]:
        """Paths of losses."""
        return [path for path in self.expected if "loss" in path.lower()]

    @property
    def shares(self) -> np.ndarray:
        """The weight of each replica's rows."""
        weights = np.ones(self.rows) if self.weights is None else self.weights
        parts = np.array_split(np.asarray(weights, np.float64), self.replicas)
        return np.array([part.sum() for part in parts])

    def explained(self, path: str, found: Mapping[str, np.ndarray], results: Leaves) -> bool:
        """Whether `results` leave little of the difference in one leaf of what was found."""
        if path not in results or path not in found or results[path].shape != found[path].shape:
            return False
        here, there, guess = found[path], self.expected[path], results[path]
        if not is_float(there):
            return bool(np.array_equal(here, guess))
        if not np.isfinite(guess).all():
            return False
        return bool(np.linalg.norm(here - guess) <= EXPLAINED * np.linalg.norm(here - there))
