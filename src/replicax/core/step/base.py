"""The seams of a step: what is summed, how it is reduced, and what makes an update of it.

Each is a protocol with named parameters, so that the step can be followed from signature to
signature: the `StepProgram` of a loss and an optimizer runs `update`, which calls `MappedSums` (a
mode maps `ReplicaSums` onto the mesh) and then `Apply`. `ReplicaSums` calls an `Accumulator` with a
`SumsFunction`, and then `ReduceReplicas`.
"""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar

import jax
import jax.numpy as jnp

from replicax.core.data.batch import Batch
from replicax.core.data.merged import Merged
from replicax.core.ground.leaves import PyTree
from replicax.core.ground.train_state import Metrics, TrainState
from replicax.core.models.definition import CallContext
from replicax.core.placement.mesh import Axis
from replicax.core.step.loss import LOSS, WeightedSum

Result = TypeVar("Result", covariant=True)


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["gradient", "weighted", "rows", "merged"],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class StepSums:
    """The sums over rows that a step needs, combined in one reduction, and results by row."""

    gradient: PyTree
    """Gradient of the total loss with respect to the params."""
    weighted: dict[str, WeightedSum]
    """The loss and the metrics, before the division."""
    rows: dict[str, PyTree] = dataclasses.field(default_factory=dict)
    """Name -> arrays `[rows, ...]`, not summed, and metrics that are no means, until `merged`."""
    merged: dict[str, Merged] = dataclasses.field(default_factory=dict)
    """Metrics that are no means, of all rows."""

    @property
    def weight(self) -> jax.Array:
        """Return the weight of the loss."""
        return self.weighted[LOSS].weight

    @property
    def divisor(self) -> jax.Array:
        """Return what the gradient is divided by, for that of the mean; 1 if the weight is 0."""
        loss = self.weighted[LOSS]
        divisor = loss.weight if loss.divisor is None else loss.divisor
        return jnp.where(divisor != 0, divisor, 1)

    def means(self) -> Metrics:
        """Return the weighted means (NaN if the weight is 0), and metrics that are no means."""
        return {name: value.mean() for name, value in self.weighted.items()} | self.merged


class SumsFunction(Protocol):
    """Sums over some rows of a batch: `Objective.step_sums`, or those of an evaluation."""

    def __call__(
        self, params: PyTree, extras: PyTree, batch: Batch, context: CallContext, /
    ) -> tuple[StepSums, PyTree]:
        """Return the sums over the rows of `batch`, and the model's other arrays after them."""


class Accumulator(Protocol):
    """Sums the micro-batches of a replica."""

    @property
    def gather(self) -> Callable[[list[jax.Array]], list[jax.Array]] | None:
        """Gathers the rows of all parts of a batch, if no axis does."""

    @property
    def row_numbers(self) -> Callable[[int], jax.Array] | None:
        """Returns the numbers, in the whole batch, of a part's so many rows, if no axis does."""

    def micro_batches(self, replicas: int, /) -> int:
        """Return the number of micro-batches each of `replicas` computes in sequence."""

    def __call__(
        self,
        function: SumsFunction,
        state: TrainState,
        batch: Batch,
        key: jax.Array | None,
        axis: Axis | None,
        /,
    ) -> tuple[StepSums, PyTree]:
        """Return the sums of `function` over this replica's rows, and the extras after the step.

        `key` is the step's key, None in evaluation. Without an `axis`, `batch` is the global batch.
        """

    def replica_key(self, key: jax.Array, axis: Axis, /) -> jax.Array:
        """Return a replica's key, derived from the step's key."""


class ReduceReplicas(Protocol):
    """Adds the sums of all replicas: the only communication of a step."""

    def __call__(
        self, sums: StepSums, reduction_state: PyTree, axis: Axis | None, /
    ) -> tuple[StepSums, PyTree]:
        """Return the total, and the state of the reduction after it.

        Without an `axis` the sums are those of the global batch already.
        """


def no_reduction(
    sums: StepSums, reduction_state: PyTree, _axis: Axis | None
) -> tuple[StepSums, PyTree]:
    """Return sums unchanged, as they are already those of all rows."""
    return sums, reduction_state


class ReplicaFunction(Protocol[Result]):
    """A part of a program from one replica's view, with how it sums rows and replicas handed in."""

    def __call__(
        self,
        state: TrainState,
        batch: Batch,
        axis: Axis | None,
        *,
        accumulator: Accumulator,
        reduce: ReduceReplicas,
    ) -> Result:
        """Return what is equal on all replicas, or shards of it.

        `batch` has this replica's rows, or all rows if there is no `axis`.
        """


class MappedFunction(Protocol[Result]):
    """A function from one replica's view as a mode maps it onto the mesh: of global arrays."""

    def __call__(self, state: TrainState, batch: Batch, /) -> Result:
        """Return the result as global arrays."""


_TotalAndStates = tuple[StepSums, PyTree, PyTree]
ReplicaSums = ReplicaFunction[_TotalAndStates]
"""`step_sums`, whose result is the total of the step's sums, and the model's other arrays and the
reduction's state after the step."""
MappedSums = MappedFunction[_TotalAndStates]
"""`step_sums` as a function of global arrays."""


@partial(jax.tree_util.register_dataclass, data_fields=["value"], meta_fields=["latest"])
@dataclasses.dataclass(frozen=True)
class StepFigure:
    """A metric of the update that is no mean over rows; a step without an update has none."""

    value: Any
    """float32 or int32 scalar; infinite where there is none, as NaN ends `jax_debug_nans`."""
    latest: bool = False
    """Whether a record of several steps has the last value, as of a counter, instead of a mean."""


class Apply(Protocol):
    """The optimizer part of a step: `apply_gradient`, or a wrapper of it."""

    def __call__(
        self, state: TrainState, total: StepSums, extras: PyTree, reduction_state: PyTree, /
    ) -> tuple[TrainState, Metrics]:
        """Return the state after the step, and metrics in addition to the means of `total`.

        A wrapper may return `StepFigure`s among them.
        """


class CompiledFunction(Protocol[Result]):
    """A function of a state and a batch, compiled at its first call for each batch size."""

    def __call__(self, state: TrainState, batch: Batch, /) -> Result:
        """Return the result; wait for no device."""

    def trace(self, state: TrainState, batch: Batch, /) -> jax.stages.Traced:
        """Return the whole computation as one trace, to be analysed."""

    def lower(self, state: TrainState, batch: Batch, /) -> jax.stages.Lowered:
        """Return the whole computation as one lowered program, to be analysed."""

    def compiled(self, state: TrainState, batch: Batch, /) -> Sequence[Any]:
        """Return the compiled programs that run, each with `as_text()`, `memory_analysis()`."""

    def text(self, state: TrainState, batch: Batch, /) -> str:
        """Return the programs that run as text, equal in processes that run the same."""

    def cache_size(self) -> int:
        """Return the number of shapes that it is compiled for."""

    @property
    def inline(self) -> MappedFunction[Result] | None:
        """The function to trace into another program; None if it takes several programs."""


StepResult = tuple[TrainState, Metrics, dict[str, PyTree]]
"""The state after a step, its metrics, and its results by row."""
StepProgram = CompiledFunction[StepResult]
"""`step(state, batch) -> (state, metrics, rows)`, on global arrays."""
