"""Evidence about a step whose results differ from one device's."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from replicax.verify.difference import Leaves, is_float

EXPLAINED = 0.1
"""A hypothesis explains a leaf if at most this share of the difference remains."""
MOST_REPLICAS = 16
"""The most replicas for which the reference is run on each replica's rows."""


@dataclasses.dataclass(frozen=True)
class Hypothesis:
    """A cause in words and the results it predicts."""

    text: str
    results: Callable[[], Leaves]


@dataclasses.dataclass(frozen=True)
class Evidence:
    """A step's results, the expected results, and the means to test explanations.

    All results are by path, as returned by `difference.leaves` and `difference.changes`: gradients,
    or the change of each leaf of the state (changes show factors, values do not), together with
    the metrics. The loss is recognized by "loss" in its path.
    """

    found: Leaves
    expected: Leaves
    bounds: Leaves
    rows: int
    """Rows of the global batch, which is split into `replicas` contiguous blocks of equal size."""
    replicas: int
    micro_batches: int = 1
    """Micro-batches per replica."""
    weights: np.ndarray | None = None
    """[rows], the weight of each row in the mean; None if all weights are equal."""
    on_rows: Callable[[np.ndarray], Leaves] | None = None
    """The reference's results on only the rows at these indices."""
    of_replica: Callable[[int], Leaves] | None = None
    """The results of one replica, if replicas differ."""
    values: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)
    """Values before the step, by path, of leaves whose changes are compared; they reveal a factor
    despite weight decay, which it does not affect."""
    others: Sequence[Hypothesis] = ()
    """Additional hypotheses of the caller, tried first."""

    @property
    def divides(self) -> bool:
        """Whether the reference can be run on the rows of each replica."""
        few = 1 < self.replicas <= MOST_REPLICAS
        return self.on_rows is not None and few and self.rows % self.replicas == 0

    @functools.cached_property
    def own(self) -> list[Leaves]:
        """Return the reference's results on the rows of each replica."""
        assert self.on_rows is not None
        return [self.on_rows(block) for block in np.split(np.arange(self.rows), self.replicas)]

    @property
    def losses(self) -> list[str]:
        """Return the paths of losses."""
        return [path for path in self.expected if "loss" in path.lower()]

    @property
    def shares(self) -> np.ndarray:
        """Return the total weight of each replica's rows."""
        weights = np.ones(self.rows) if self.weights is None else self.weights
        parts = np.array_split(np.asarray(weights, np.float64), self.replicas)
        return np.array([part.sum() for part in parts])

    def explained(self, path: str, found: Mapping[str, np.ndarray], results: Leaves) -> bool:
        """Whether `results` explain most of the difference in one leaf of `found`."""
        if path not in results or path not in found or results[path].shape != found[path].shape:
            return False
        here, there, guess = found[path], self.expected[path], results[path]
        if not is_float(there):
            return bool(np.array_equal(here, guess))
        if not np.isfinite(guess).all():
            return False
        return bool(np.linalg.norm(here - guess) <= EXPLAINED * np.linalg.norm(here - there))
