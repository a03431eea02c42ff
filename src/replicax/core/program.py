"""Build the step and the score of a configuration and a model, ready to be compiled."""

import dataclasses
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from replicax.core.built_in_step import ModelOnMesh, written_step, written_step_of_micro_shard
from replicax.core.config import Configuration
from replicax.core.data.batch import Batch, Share, described, host_rows, pad, row_count
from replicax.core.data.feed import Split
from replicax.core.data.host_arrays import opened
from replicax.core.exact.micro_shard_step import MicroShardStep, OnMicroShard, on_micro_shard
from replicax.core.first_step.argument_checks import check_kind, check_loss
from replicax.core.ground.leaves import PyTree
from replicax.core.ground.train_state import TrainState, check_outside_jit
from replicax.core.models.definition import SplitModel
from replicax.core.models.pytree import CustomState
from replicax.core.modes import lift
from replicax.core.placement.layout import on_devices_of
from replicax.core.placement.mesh import (
    AnyMesh,
    batch_shardings,
    by_rows,
    replica_count,
    replicated,
)
from replicax.core.step.custom_step import custom_update, keep
from replicax.core.step.loss_scale import first_scale
from replicax.core.step.objective import LossFunction, only_read
from replicax.core.step.optimizer import Updater, average_of
from replicax.core.step.optimizer import updater as updater_of
from replicax.core.step.reduction import REDUCTIONS
from replicax.core.step.update import score
from replicax.errors import ConfigError, StateError


@dataclasses.dataclass(frozen=True)
class Program(ModelOnMesh):
    """The step and the score of one model on one mesh, traced when first run."""

    @cached_property
    def step(self) -> Any:
        """The function `(state, batch) -> (state, metrics)`: from `jax.jit`, or `MicroShardStep`.

        `ConfigError` if the layout, the reduction and the optimizer are incompatible.
        """
        config, mesh, mode = self.configuration, self.mesh, self.configuration.mode
        into = self.shardings, batch_shardings(mesh)
        out = self.shardings, replicated(mesh)
        of_micro_shard: OnMicroShard | None
        if config.step is None:
            step, of_micro_shard = written_step(self), written_step_of_micro_shard(self)
        else:
            step = mode.wrap(self.custom_step, mesh, into, out)
            of_micro_shard = on_micro_shard(self.custom_step, mode, config.reduction, gathers=True)
        whole = jax.jit(
            step,
            in_shardings=into,
            out_shardings=out,
            donate_argnums=0 if config.donate else (),
            compiler_options=config.options(mesh) or None,
        )
        return self._run("step", of_micro_shard, whole, out, donate=config.donate)

    @cached_property
    def custom_step(self) -> Any:
        """The custom step from a replica's view, `(state, batch, axis)`, with parts by keyword."""
        config, definition = self.configuration, self.definition
        if jax.tree.leaves(self.shapes.reduction):
            raise ConfigError(
                f"step= with reduction={config.reduction!r}, which keeps state for one sum between "
                "steps; a custom step may have several sums: use 'float32' or 'bfloat16'"
            )
        assert config.step is not None
        assert isinstance(definition, CustomState)
        return partial(
            custom_update,
            step=config.step,
            definition=definition,
            precision=config.precision,
            accumulator=config.accumulator(self.mesh),
            reduce=config.mode.reduce(config.reduction, None),
            apply=config.wrapped(keep),
        )

    @cached_property
    def score(self) -> Any:
        """The function `(state, batch) -> sums of loss and metrics`, of the same kind as `step`."""
        config, mesh, mode = self.configuration, self.mesh, self.configuration.mode
        plain, out = REDUCTIONS["float32"], replicated(mesh)
        of_objective = partial(score, objective=self.split_objective)
        evaluation = partial(
            of_objective, accumulator=config.accumulator(mesh), reduce=mode.reduce(plain, None)
        )
        whole = lift(evaluation, mode, mesh, self.shardings, batch_shardings(mesh), out)
        of_micro_shard = on_micro_shard(of_objective, mode, plain)
        return self._run("score", of_micro_shard, whole, out, donate=False)

    def _run(
        self, name: str, of_micro_shard: OnMicroShard | None, whole: Any, out: PyTree, donate: bool
    ) -> Any:
        """Return `whole`, or programs that are the same on any number of devices."""
        if of_micro_shard is None or not isinstance(self.mesh, Mesh):
            return whole
        config, where = self.configuration, self.shardings
        return MicroShardStep(name, of_micro_shard, whole, config, self.mesh, where, out, donate)

    def compiled(self, state: TrainState, batch: Batch) -> list[Any]:
        """Return the compiled programs of `step` for these arguments, with `memory_analysis()`."""
        if isinstance(self.step, MicroShardStep):
            return list(self.step.programs(state, batch))
        return [self.step.lower(state, batch).compile()]

    def scoring(self, loss: LossFunction) -> "Program":
        """Return this program with `loss` for evaluation, unaccumulated, as it may gather rows."""
        check_loss(loss)
        config = dataclasses.replace(self.configuration, loss=loss, step=None, accumulate=1)
        return dataclasses.replace(self, configuration=config)

    @property
    def split(self) -> Split:
        """The division of a batch into replicas and micro-batches."""
        return self.configuration.split(self.mesh)

    def described(self, batch: Any) -> Batch:
        """Return the shapes of the batch that `step` uses for a `Batch` or pytree `[rows, ...]`."""
        if not isinstance(batch, Batch):
            batch = described(batch, self.split.padded(row_count(batch)))
        shapes: Batch = jax.eval_shape(lambda arrays: arrays, batch)
        return shapes

    def is_of(self, shapes: TrainState) -> bool:
        """Whether states of these shapes, dtypes and structure belong to this program."""

        def kinds(state: TrainState) -> Any:
            leaves, structure = jax.tree.flatten(state)
            return structure, [(leaf.shape, leaf.dtype) for leaf in leaves]

        return bool(kinds(shapes) == kinds(self.shapes))

    def init(self, params: PyTree, extras: PyTree, seed: int) -> TrainState:
        """Return the state before the first step, each array placed according to the layout."""
        where = (self.shardings.params, self.shardings.extras)
        params, extras = jax.tree.map(on_devices_of, (params, extras), where)
        create = partial(_create_state, self.configuration, self.mesh, self.updater)
        make = jax.jit(create, out_shardings=self.shardings)
        state: TrainState = make(params, extras, np.uint32(seed))
        return state

    def holds(self, state: Any, batch: Any) -> bool:
        """Whether these are a state and a batch with the shardings that `step` uses."""
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
        """Return rows as a padded batch with the sharding that `step` uses."""
        data = opened(data)
        check_outside_jit(data)
        rows = row_count(data)
        size = self.split.padded(rows)
        if rows < size or not all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(data)):
            data = host_rows(data, copy=True)
        return Share(by_rows(self.mesh), size).place(pad(data, size, np.arange(rows)))

    def averaged(self, state: TrainState) -> TrainState:
        """Return `state` with its parameters replaced by their average."""
        check_kind(state)
        with self.configuration.undisturbed():
            average = jax.jit(average_of, out_shardings=self.shardings.params)
            return dataclasses.replace(state, params=average(state.opt_state, state.params))

    def abstract_state(self) -> TrainState:
        """Return the shapes and shardings of a state."""
        abstract: TrainState = jax.tree.map(
            lambda leaf, sharding: leaf.update(sharding=sharding), self.shapes, self.shardings
        )
        return abstract


def _create_state(
    configuration: Configuration,
    mesh: AnyMesh,
    updater: Updater,
    params: PyTree,
    extras: PyTree,
    seed: jax.Array,
) -> TrainState:
    """Create the state before the first step."""
    replicas = replica_count(mesh)
    of_one = configuration.reduction.init(only_read(params, updater.read))
    return TrainState(
        step=jnp.int32(0),
        params=params,
        opt_state=updater.optimizer.init(params),
        extras=extras,
        seed=jnp.uint32(seed),
        reduction=jax.tree.map(
            lambda leaf: jnp.broadcast_to(leaf, (replicas, *leaf.shape)), of_one
        ),
        scale=first_scale() if configuration.precision.scales else (),
    )


def program_of(
    configuration: Configuration,
    model: TrainState | SplitModel,
    mesh: AnyMesh,
    known: Program | None,
) -> Program:
    """Return `known` if it is the program of `model` on `mesh`, otherwise a new one.

    `model` is the parts of a model, or a state of the known program; arrays or their shapes.
    """
    if isinstance(model, TrainState):
        if known is None:
            raise StateError("this DataParallel has no model yet; call init(model) first")
        definition, updater = known.definition, known.updater
        shapes = jax.eval_shape(lambda state: state, model)
    else:
        definition, params, extras = model
        config = configuration
        updater = updater_of(config.optimizer, config.trainable, config.ema, definition, params)
        create = partial(_create_state, configuration, mesh, updater)
        found = jax.eval_shape(create, params, extras, np.uint32(0))
        shapes = jax.tree.map(lambda leaf: leaf.update(sharding=None), found)  # not the caller's
    if known is not None and definition != known.definition:
        raise ConfigError(
            "init was given a model whose structure differs from before; a DataParallel trains one "
            "structure: create a second DataParallel"
        )
    same = known and configuration == known.configuration and mesh == known.mesh
    if known and same and known.is_of(shapes):
        return known
    program = Program(configuration, mesh, definition, updater, shapes)
    _ = program.step  # raises now if the configuration is invalid
    return program
