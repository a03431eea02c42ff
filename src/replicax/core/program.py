"""A configuration and a model -> the step and the score, as functions ready to be compiled."""

import dataclasses
from collections.abc import Callable
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from replicax.core.average import average_of
from replicax.core.batch import Batch, Share, described, host_rows, pad, row_count
from replicax.core.configuration import Configuration
from replicax.core.feed import Split
from replicax.core.layout import on_devices_of
from replicax.core.mesh import AnyMesh, by_rows, replica_count, replicated
from replicax.core.micro_sharded import MicroSharded, OnMicroShard, on_micro_shard
from replicax.core.models.definition import Definition, Parts, PyTree
from replicax.core.models.pytree import OwnState
from replicax.core.modes import batch_shardings, lift
from replicax.core.objective import LossFunction, Objective, only_read
from replicax.core.optimizer import Updater
from replicax.core.own import keep, own_update
from replicax.core.reduction import REDUCTIONS
from replicax.core.refused import check_kind, check_loss, check_outside_jit
from replicax.core.scaling import first_scale
from replicax.core.update import (
    TrainState,
    create,
    score,
)
from replicax.core.written import in_place, written_step, written_step_of_micro_shard
from replicax.errors import ConfigError, StateError


@dataclasses.dataclass(frozen=True)
class Program:
    """The step and the score of one model on one mesh."""

    configuration: Configuration
    mesh: AnyMesh
    definition: Definition
    objective: Objective
    """The loss on the model, on whole parameters."""
    shapes: TrainState
    """Shapes and dtypes of a state."""
    shardings: TrainState
    """Where its arrays live."""
    updater: Updater
    """The optimizer, on what trains, with the average that is wanted."""
    own_step: Any
    """A step of one's own in one replica's view, `(state, batch, axis)`, its parts by keyword."""
    step: Any
    """A function `(state, batch) -> (state, metrics)`: of `jax.jit`, or `MicroSharded`."""

    @cached_property
    def score(self) -> Any:
        """A function `(state, batch) -> sums of loss and metrics`, as `step` is one."""
        config, mesh, mode = self.configuration, self.mesh, self.configuration.mode
        of_objective = partial(score, objective=self.split_objective)
        plain = REDUCTIONS["float32"]
        evaluation = partial(
            of_objective,
            accumulator=config.accumulator(mesh),
            reduce=mode.reduce(plain, None),
        )
        out = replicated(mesh)
        whole = lift(evaluation, mode, mesh, self.shardings, batch_shardings(mesh), out)
        parts = on_micro_shard(of_objective, mode, plain)
        return _run(
            dataclasses.replace(config, donate=False),
            mesh,
            "score",
            parts,
            whole,
            self.shardings,
            out,
        )

    def compiled(self, state: TrainState, batch: Batch) -> list[Any]:
        """Return the programs of `step` for these arguments, each with a `memory_analysis()`."""
        if isinstance(self.step, MicroSharded):
            return list(self.step.programs(state, batch))
        return [self.step.lower(state, batch).compile()]

    def scoring(self, loss: LossFunction) -> "Program":
        """Return this one with `loss` in evaluation, at once: it may gather its rows."""
        check_loss(loss)
        return dataclasses.replace(
            self,
            configuration=dataclasses.replace(self.configuration, step=None, accumulate=1),
            objective=dataclasses.replace(self.objective, loss=loss),
        )

    @property
    def split_objective(self) -> Objective:
        """`objective`, on parameters that lie as the layout has them."""
        return in_place(self.objective, self.configuration, self.shardings, self.mesh)

    @property
    def split(self) -> Split:
        """How a batch is divided: replicas and micro-batches."""
        return self.configuration.split(self.mesh)

    def described(self, batch: Any) -> Batch:
        """Return the shapes of the batch that `step` runs for a `Batch` or pytree `[rows, ...]`."""
        if not isinstance(batch, Batch):
            batch = described(batch, self.split.padded(row_count(batch)))
        shapes: Batch = jax.eval_shape(lambda arrays: arrays, batch)
        return shapes

    def is_of(self, shapes: TrainState) -> bool:
        """Whether states of these shapes, dtypes and structure are those of this program."""

        def kinds(state: TrainState) -> Any:
            leaves, structure = jax.tree.flatten(state)
            return structure, [(leaf.shape, leaf.dtype) for leaf in leaves]

        return bool(kinds(shapes) == kinds(self.shapes))

    def init(self, params: PyTree, extras: PyTree, seed: int) -> TrainState:
        """Return the state before the first step, each array placed where its layout wants it."""
        where = (self.shardings.params, self.shardings.extras)
        params, extras = jax.tree.map(on_devices_of, (params, extras), where)
        create = create_state(self.configuration, self.mesh, self.updater)
        make = jax.jit(create, out_shardings=self.shardings)
        state: TrainState = make(params, extras, np.uint32(seed))
        return state

    def holds(self, state: Any, batch: Any) -> bool:
        """Whether these are a state and a batch that lie where `step` has them."""
        if not (isinstance(state, TrainState) and isinstance(batch, Batch)):
            return False
        where = batch_shardings(self.mesh)
        wanted = jax.tree.leaves((self.shardings, jax.tree.broadcast(where, batch)))
        leaves = jax.tree.leaves((state, batch))
        return len(leaves) == len(wanted) and all(
            isinstance(leaf, jax.Array) and leaf.sharding.is_equivalent_to(sharding, leaf.ndim)
            for leaf, sharding in zip(leaves, wanted, strict=True)
        )

    def placed(self, data: PyTree) -> Batch:
        """Return rows as a batch that lies where `step` has it, padded."""
        check_outside_jit(data)
        rows = row_count(data)
        size = self.split.padded(rows)
        if rows < size or not all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(data)):
            data = host_rows(data, copy=True)
        return Share(by_rows(self.mesh), size).place(pad(data, size, np.arange(rows)))

    def averaged(self, state: TrainState) -> TrainState:
        """Return `state` with the average of the parameters in their place."""
        check_kind(state)
        average = jax.jit(average_of, out_shardings=self.shardings.params)
        return dataclasses.replace(state, params=average(state.opt_state, state.params))

    def abstract_state(self) -> TrainState:
        """Return the shapes of a state with their shardings."""
        abstract: TrainState = jax.tree.map(
            lambda leaf, sharding: leaf.update(sharding=sharding), self.shapes, self.shardings
        )
        return abstract


def create_state(
    configuration: Configuration, mesh: AnyMesh, updater: Updater
) -> Callable[..., TrainState]:
    """Return `create(params, extras, seed)` of a configuration."""
    replicas = replica_count(mesh)

    def of_each_replica(params: PyTree) -> PyTree:
        own = configuration.reduction.init(only_read(params, updater.read))
        return jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (replicas, *leaf.shape)), own)

    scale = first_scale if configuration.precision.scales else tuple
    return partial(create, optimizer=updater.optimizer, reduction=of_each_replica, scale=scale)


def program_of(
    configuration: Configuration, model: TrainState | Parts, mesh: AnyMesh, known: Program | None
) -> Program:
    """Return `known` if it is the program of `model` on `mesh`, and else another.

    `model` is taken apart, or a state of the known program; arrays or their shapes.
    """
    if isinstance(model, TrainState):
        if known is None:
            raise StateError("this DataParallel has no model yet; call init(model) first")
        definition, updater = known.definition, known.updater
        shapes = jax.eval_shape(lambda state: state, model)
    else:
        definition, params, extras = model
        updater = configuration.updater(definition, params)
        create = create_state(configuration, mesh, updater)
        shapes = jax.eval_shape(create, params, extras, np.uint32(0))
    if known is None:
        return build(configuration, definition, updater, shapes, mesh)
    if definition != known.definition:
        raise ConfigError(
            "init was given a model of another structure than before; one DataParallel trains one: "
            "make a second DataParallel"
        )
    same = configuration == known.configuration and mesh == known.mesh and known.is_of(shapes)
    return known if same else build(configuration, definition, updater, shapes, mesh)


def build(
    configuration: Configuration,
    definition: Definition,
    updater: Updater,
    shapes: TrainState,
    mesh: AnyMesh,
) -> Program:
    """Return the step and the score, not yet traced; the same arguments give the same program.

    `mesh` are attached devices, described ones, or how many replicas.
    """
    config, mode = configuration, configuration.mode
    shardings = config.placing.shardings(shapes, mesh)
    objective = Objective(definition, config.loss, config.precision, updater.read)
    where = (shardings, batch_shardings(mesh))
    out, own_step = (shardings, replicated(mesh)), None
    of_micro_shard: OnMicroShard | None = None
    if config.step is None:
        parts = (config, mesh, objective, updater, shapes, shardings)
        step = written_step(*parts)
        if mode.bitwise:
            of_micro_shard = written_step_of_micro_shard(*parts)
    else:
        if jax.tree.leaves(shapes.reduction):
            raise ConfigError(
                f"step= with reduction={config.reduction!r}, which remembers one sum from step to "
                "step; a step of one's own may sum several: use 'float32' or 'bfloat16'"
            )
        assert isinstance(definition, OwnState)
        own_step = partial(
            own_update,
            step=config.step,
            definition=definition,
            precision=config.precision,
            accumulator=config.accumulator(mesh),
            reduce=mode.reduce(config.reduction, None),
            apply=config.wrapped(keep),
        )
        step = mode.wrap(own_step, mesh, where, out)
        of_micro_shard = on_micro_shard(own_step, mode, config.reduction, gathers=True)
    donated = 0 if config.donate else ()
    whole = jax.jit(
        step,
        in_shardings=where,
        out_shardings=out,
        donate_argnums=donated,
        compiler_options=config.options(mesh) or None,
    )
    return Program(
        configuration=config,
        mesh=mesh,
        definition=definition,
        objective=objective,
        shapes=shapes,
        shardings=shardings,
        updater=updater,
        own_step=own_step,
        step=_run(config, mesh, "step", of_micro_shard, whole, shardings, out),
    )


def _run(
    config: Configuration,
    mesh: AnyMesh,
    name: str,
    of_micro_shard: OnMicroShard | None,
    whole: Any,
    where: TrainState,
    out: PyTree,
) -> Any:
    """Return a callable of state and batch: `whole`, or the same programs on any devices."""
    if of_micro_shard is None or not isinstance(mesh, Mesh):
        return whole
    return MicroSharded(
        name,
        of_micro_shard,
        whole,
        mesh=mesh,
        micro_shards=config.micro_shards,
        where=where,
        out=out,
        in_flight=config.job.in_flight,
        donate=config.donate,
    )
