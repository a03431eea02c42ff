"""How a function from one replica's view runs on a mesh, and how its sums are reduced."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding

from replicax.core.data.batch import Batch
from replicax.core.ground.leaves import PyTree
from replicax.core.ground.train_state import TrainState
from replicax.core.modes.step_builder import Jitted, Mapped, ReplicaView, StepSpec, Wrap, build
from replicax.core.placement.layout import Layout
from replicax.core.placement.mesh import (
    DATA,
    STAGE,
    AnyMesh,
    Axis,
    by_rows,
    is_data_only,
    options_on,
    replica_count,
    row_axis,
)
from replicax.core.step.accumulate import Sequential
from replicax.core.step.base import (
    Accumulator,
    CompiledFunction,
    MappedFunction,
    ReduceReplicas,
    StepSums,
    no_reduction,
)
from replicax.core.step.reduction import REDUCTIONS, GradientShards, Reduction, Wire
from replicax.errors import ConfigError
from replicax.text.arguments import answered


def global_view(
    function: ReplicaView[Mapped], _mesh: AnyMesh, _into: tuple[TrainState, Batch], _out: PyTree
) -> MappedFunction[Mapped]:
    """Apply no mapping: the function sees the whole batch, and the compiler partitions the work."""
    return partial(function, axis=None)


def shard_map(
    function: ReplicaView[Mapped], mesh: AnyMesh, into: tuple[TrainState, Batch], out: PyTree
) -> MappedFunction[Mapped]:
    """Map by `jax.shard_map` over the axes of the rows."""
    # With check_vma=True a scan in the model from zeros (any RNN) is a type error, and parameters
    # must be cast to varying, or their gradient is N times too large. Without it, the gradient of
    # a replica's sum is local, and `step_sums` makes the only reduction.
    return jax.shard_map(
        lambda state, batch: function(state, batch, row_axis(mesh)),
        mesh=mesh,
        in_specs=jax.tree.map(lambda sharding: sharding.spec, into),
        out_specs=jax.tree.map(lambda sharding: sharding.spec, out),
        check_vma=False,
    )


def pmap(
    function: ReplicaView[Mapped], mesh: Mesh, into: tuple[TrainState, Batch], out: PyTree
) -> MappedFunction[Mapped]:
    """Map by `jax.pmap`, the classic API."""
    replicas = replica_count(mesh)

    def stack(leaf: jax.Array) -> jax.Array:
        return leaf.reshape(replicas, leaf.shape[0] // replicas, *leaf.shape[1:])

    def join(leaf: jax.Array) -> jax.Array:
        return leaf.reshape(replicas * leaf.shape[1], *leaf.shape[2:])

    def call(state: TrainState, batch: Batch) -> Any:
        mapped = jax.pmap(
            lambda state, batch: function(state, batch, DATA),
            axis_name=DATA,
            in_axes=jax.tree.map(_axis, into),
            out_axes=jax.tree.map(_axis, out),
            devices=list(mesh.devices.flat),
        )
        stacked = jax.tree.map(partial(_where_split, stack), into, (state, batch))
        return jax.tree.map(partial(_where_split, join), out, mapped(*stacked))

    return call


def _axis(sharding: NamedSharding) -> int | None:
    return 0 if sharding.spec == by_rows(sharding.mesh).spec else None


def _where_split(
    function: Callable[[jax.Array], jax.Array], where: NamedSharding, tree: PyTree
) -> PyTree:
    return tree if _axis(where) is None else jax.tree.map(function, tree)


def sequential(accumulate: int, _: int, mesh: AnyMesh, *_rest: Any) -> Accumulator:
    """Return the accumulator of micro-batches in sequence."""
    staged = mesh.shape.get(STAGE, 1) > 1
    return Sequential(within=accumulate) if staged else Sequential(accumulate)


def by_compiler(reduction: Reduction, _shards: GradientShards | None = None) -> ReduceReplicas:
    """Return no reduction: the compiler inserts it, in the dtype of the sums."""
    if reduction != REDUCTIONS["float32"]:
        raise ConfigError(
            f"reduction={getattr(reduction, 'name', reduction)!r} in a mode that sees the whole "
            "batch; there the compiler inserts the reduction, in float32: use mode='shard_map'"
        )
    return no_reduction


def of_each_replica(reduction: Reduction, shards: GradientShards | None = None) -> ReduceReplicas:
    """Return `reduction` on one replica's part, `[1, ...]`, of its `[replicas, ...]` state."""

    def reduce(
        sums: StepSums, reduction_state: PyTree, axis: Axis | None
    ) -> tuple[StepSums, PyTree]:
        assert axis is not None
        if shards is not None and isinstance(reduction, Wire):
            return shards.reduce(sums, axis, reduction.add, reduction.scatter), reduction_state
        total, own = reduction(sums, jax.tree.map(lambda leaf: leaf[0], reduction_state), axis)
        if shards is not None:
            total = shards.of_total(total)
        return total, jax.tree.map(lambda leaf: leaf[None], own)

    return reduce


@answered
@dataclasses.dataclass(frozen=True)
class Mode:
    """How a step is mapped onto the mesh and its sums are reduced. `str(mode)` is its name.

    Examples:
        >>> dp = rx.DataParallel(loss, optimizer, mode="shard_map")
        >>> print(dp.mode, dp.mode.per_replica)
        shard_map True
    """

    name: str
    wrap: Wrap
    """Maps a function from one replica's view: of the whole batch and no axis, or of a replica's
    rows and the axis to reduce over."""
    _: dataclasses.KW_ONLY
    per_replica: bool = False
    """Whether the function sees one replica's rows, each replica with its own random numbers."""
    splits_optimizer: bool = False
    """Whether it supports layouts that split the optimizer state."""
    splits_params: bool = False
    """Whether it supports layouts that split the parameters."""
    partitions: bool = False
    """Whether it can partition a replica over devices by layout rules."""
    most_devices: int | None = None
    most_processes: int | None = None
    instead: str = "jit"
    """The mode to use for configurations that this one does not support."""
    accumulator: Callable[[int, int, AnyMesh, Reduction], Accumulator] = sequential
    """`accumulator(accumulate, micro_shards, mesh, reduction)`; raises `ConfigError`."""
    reduce: Callable[[Reduction, GradientShards | None], ReduceReplicas] = of_each_replica
    """`reduce(reduction, shards)` -> the function that the step calls. `shards` says which part of
    the total each replica gets; None for all of it. Raises `ConfigError`."""
    build: Callable[[StepSpec], CompiledFunction[Any]] = build
    """Builds the step, or the scoring of an evaluation."""
    bitwise: bool = False
    """Whether `build` makes results bitwise identical on any number of devices, of a batch that is
    always cut into `micro_shards`."""
    analysed: str = ""
    """The program that figures of the compiled step describe, if it is not the one that runs."""

    def __str__(self) -> str:
        return self.name

    def check(self, mesh: AnyMesh, layout: Layout) -> None:
        """Raise `ConfigError` if this mode cannot run on `mesh` or with `layout`."""
        devices, processes = mesh.size, jax.process_count()
        if self.most_devices is not None and devices > self.most_devices:
            raise ConfigError(
                f"mode={self.name!r} with a mesh of {devices} devices; it supports at most "
                f"{self.most_devices}: use mode={self.instead!r}, or a mesh of one device"
            )
        if self.most_processes is not None and processes > self.most_processes:
            raise ConfigError(
                f"mode={self.name!r} on {processes} processes; it supports at most "
                f"{self.most_processes}: use mode={self.instead!r}, which computes the same"
            )
        if not (self.partitions or is_data_only(mesh)):
            raise ConfigError(
                f"mode={self.name!r} with a mesh of {devices} devices and {replica_count(mesh)} "
                "replicas; in this mode each device holds a whole replica: use mode='jit'"
            )
        if not self.holds(layout):
            raise ConfigError(
                f"mode={self.name!r} with layout={layout.name!r}, which splits arrays that this "
                "mode replicates: use mode='jit', or layout='replicated'"
            )

    def holds(self, layout: Layout) -> bool:
        """Whether it supports `layout`."""
        return (
            (self.splits_optimizer or not layout.splits_optimizer)
            and (self.splits_params or not layout.splits_params)
            and (self.partitions or not layout.rules)
        )


def lift(
    function: ReplicaView[Any], mode: Mode, mesh: AnyMesh, state: PyTree, batch: PyTree, out: PyTree
) -> Jitted[Any]:
    """Return `function`, compiled, of a state and a global batch.

    `state`, `batch` and `out` (the results) are shardings, or one sharding for the whole tree.
    """
    return Jitted(
        mode.wrap(function, mesh, (state, batch), out),
        (state, batch),
        out,
        compiler_options=options_on(mesh),
    )
