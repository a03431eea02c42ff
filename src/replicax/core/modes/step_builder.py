"""Build a step, or the score of an evaluation, from its parts: by default one `jax.jit` program."""

import dataclasses
from collections.abc import Sequence
from functools import cached_property, partial
from typing import Any, Generic, Protocol, TypeVar

import jax
from jax.sharding import NamedSharding, PartitionSpec

from replicax.core.data.batch import Batch
from replicax.core.ground.in_flight import InFlight
from replicax.core.ground.job import PartsExchange
from replicax.core.ground.leaves import PyTree
from replicax.core.ground.train_state import TrainState
from replicax.core.placement.layout import Layout
from replicax.core.placement.mesh import (
    AnyMesh,
    Axis,
    batch_shardings,
    by_rows,
    replicated,
    shard_axis,
)
from replicax.core.step.base import (
    Accumulator,
    Apply,
    CompiledFunction,
    MappedFunction,
    ReduceReplicas,
    ReplicaFunction,
    Result,
)
from replicax.core.step.objective import Objective
from replicax.core.step.reduction import Reduction
from replicax.core.step.update import update
from replicax.errors import ConfigError

Mapped = TypeVar("Mapped")


class ReplicaView(Protocol[Result]):
    """A function from one replica's view: of its rows, and the axis to reduce over.

    Without an axis it sees the whole batch.
    """

    def __call__(self, state: TrainState, batch: Batch, axis: Axis | None) -> Result:
        """Return results that are equal on all replicas, or shards of them."""


class Wrap(Protocol):
    """Maps a `ReplicaView` onto a mesh."""

    def __call__(
        self,
        function: ReplicaView[Mapped],
        mesh: Any,
        into: tuple[TrainState, Batch],
        out: PyTree,
        /,
    ) -> MappedFunction[Mapped]:
        """Return a function of global arrays.

        Args:
            function: the function from one replica's view.
            mesh: a `jax.sharding.Mesh`, or one of described devices.
            into: the shardings of the state and the batch.
            out: the shardings of the result, or one for the whole tree.
        """


@dataclasses.dataclass(frozen=True)
class StepSpec:
    """Everything that a program is built of; a mode may build it in its own way."""

    name: str
    """Its name in profiles: `step` or `score`."""
    sums: ReplicaFunction[Any]
    """`ReplicaSums`, or, without `apply`, a function that returns the result."""
    objective: Objective
    """The loss of the model on whole parameters."""
    mesh: AnyMesh
    layout: Layout
    shapes: TrainState
    """Shapes and dtypes of a state."""
    state: TrainState
    """Shardings of a state."""
    total: PyTree
    """Shardings of what `sums` returns."""
    out: PyTree
    """Shardings of the result."""
    wrap: Wrap
    accumulator: Accumulator
    reduction: Reduction
    reduce: ReduceReplicas
    """`reduction`, as `Mode.reduce` makes it a part of the step."""
    names_replicas: bool
    """Whether `apply` names the replica axis, as `lax.pmean` in an optimizer does, and the mode has
    one."""
    micro_shards: int
    compiler_options: dict[str, Any] | None
    in_flight: InFlight
    """Tracks and limits the steps that were dispatched."""
    exchange: PartsExchange | None
    """How parts of a batch are computed together with other jobs, if there are any."""
    apply: Apply | None = None
    """The update of global arrays from what `sums` returns; None if that is the result."""
    gradient: PyTree = None
    """Shardings of the reduced gradient, where it is used, if the layout splits the optimizer."""
    donate: bool = False
    """Whether the memory of the state is reused."""


def build(parts: StepSpec) -> CompiledFunction[Any]:
    """Return the program of `parts`: one `jax.jit` function."""
    return jitted(parts, mapped(parts))


def mapped(parts: StepSpec) -> MappedFunction[Any]:
    """Return `parts.sums` as a function of global arrays."""
    sums = partial(parts.sums, accumulator=parts.accumulator, reduce=parts.reduce)
    return parts.wrap(sums, parts.mesh, (parts.state, batch_shardings(parts.mesh)), parts.total)


def jitted(
    parts: StepSpec, sums: MappedFunction[Any], given: PyTree | None = None
) -> "Jitted[Any]":
    """Return the program that updates the state from `sums`, or `sums` if there is no update.

    `given` is the shardings of the second argument, by default those of a batch.
    """
    function: MappedFunction[Any] = sums
    if parts.apply is not None:
        apply = _of_each_replica(parts, parts.apply) if parts.names_replicas else parts.apply
        if parts.layout.splits_optimizer:
            from replicax.core.placement.matrix_owners import on_mesh, performing

            axis, whole = shard_axis(parts.mesh), not parts.layout.splits_params
            apply = performing(partial(on_mesh, parts.mesh, axis, whole))(apply)
        function = partial(update, sums=sums, apply=apply)
    return Jitted(
        function,
        (parts.state, batch_shardings(parts.mesh) if given is None else given),
        parts.out,
        donate_argnums=0 if parts.donate else (),
        compiler_options=parts.compiler_options,
    )


class Jitted(Generic[Result]):
    """A `jax.jit` function as a `CompiledFunction`."""

    def __init__(
        self,
        function: MappedFunction[Result],
        into: tuple[PyTree, PyTree],
        out: PyTree,
        **options: Any,
    ) -> None:
        self._given = function, into, out, options
        compiled = jax.jit(function, in_shardings=into, out_shardings=out, **options)
        self._function, self.trace, self.lower = compiled, compiled.trace, compiled.lower

    def __call__(self, state: TrainState, batch: Batch) -> Result:
        return self._function(state, batch)  # type: ignore[no-any-return]

    def compiled(self, state: TrainState, batch: Batch) -> Sequence[Any]:
        return [self.lower(state, batch).compile()]

    def cache_size(self) -> int:
        return int(self._function._cache_size())  # type: ignore[attr-defined]

    def text(self, state: TrainState, batch: Batch) -> str:
        text: str = self.lower(state, batch).as_text()
        return text

    @cached_property
    def inline(self) -> MappedFunction[Result]:
        """The function without options of a program, which only the outermost one takes."""
        function, into, out, _ = self._given
        return jax.jit(function, in_shardings=into, out_shardings=out)

    def repeated(self) -> "Jitted[Any]":
        """Return this step, one after another on each of several batches, as one program.

        Its second argument and its results have a leading dim of steps.
        """
        _, (state, batch), (after, *results), options = self._given
        out = after, *jax.tree.map(_of_steps, results)
        return Jitted(
            partial(_repeated, step=self.inline),
            (state, jax.tree.map(_of_steps, batch)),
            out,
            **options,
        )


def _repeated(state: TrainState, batches: Batch, *, step: MappedFunction[Any]) -> Any:
    def one(state: TrainState, batch: Batch) -> tuple[TrainState, Any]:
        state, *results = step(state, batch)
        return state, results

    state, results = jax.lax.scan(one, state, batches)
    return state, *results


def _of_steps(sharding: NamedSharding) -> NamedSharding:
    """Return the sharding of an array of `[steps, ...]`, from that of one step."""
    return NamedSharding(sharding.mesh, PartitionSpec(None, *sharding.spec))


def check_whole(layout: Layout) -> None:
    """Raise `ConfigError` if `layout` splits a state whose optimizer names the replica axis."""
    if not layout.is_whole:
        raise ConfigError(
            f"layout={layout.name!r} with an optimizer that names the replica axis, over which the "
            "layout splits arrays: use layout='replicated', or remove lax.pmean from it"
        )


def _of_each_replica(parts: StepSpec, apply: Apply) -> Apply:
    """Return `apply` with the replica axis in scope; all arrays are whole."""
    check_whole(parts.layout)
    everywhere, by_replica = replicated(parts.mesh).spec, by_rows(parts.mesh).spec
    names = {field.name for field in dataclasses.fields(TrainState)} - {"definition"}
    specs: dict[str, Any] = {**dict.fromkeys(names, everywhere), "reduction": by_replica}
    state = TrainState(**specs)
    return jax.shard_map(
        apply,
        mesh=parts.mesh,
        in_specs=(state, everywhere, everywhere, by_replica),
        out_specs=(state, everywhere),
        check_vma=False,
    )
