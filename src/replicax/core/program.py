"""Build the step and the score of a configuration and a model, ready to be compiled."""

import dataclasses
from collections.abc import Callable
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from replicax.core.batch_placement import BatchPlacement
from replicax.core.between.seam import Between
from replicax.core.config import Configuration
from replicax.core.custom.custom_step import custom_update, keep
from replicax.core.data.batch import Batch
from replicax.core.data.feed import Split
from replicax.core.data.per_row import map_rows_of_state, padded_rows, rows_of_state
from replicax.core.first_step.argument_checks import check_loss
from replicax.core.ground.leaves import PyTree
from replicax.core.ground.train_state import TrainState, Uncompared
from replicax.core.models.definition import Definition, SplitModel
from replicax.core.models.pytree import CustomState
from replicax.core.modes.step_builder import Jitted, StepSpec
from replicax.core.placement.layout import on_devices_of
from replicax.core.placement.mesh import (
    STAGE,
    AnyMesh,
    batch_shardings,
    by_rows,
    options_on,
    replica_count,
    replicated,
    shard_axis,
)
from replicax.core.step.base import (
    Apply,
    CompiledFunction,
    ReplicaFunction,
    ReplicaSums,
    StepProgram,
    StepResult,
    StepSums,
)
from replicax.core.step.loss_scale import first_scale, plain, unscaling
from replicax.core.step.objective import LossFunction, Objective, only_read
from replicax.core.step.optimizer import Updater, average_of
from replicax.core.step.optimizer import updater as updater_of
from replicax.core.step.reduction import REDUCTIONS, GradientShards, Reduction, shards_of
from replicax.core.step.update import apply_gradient, score, step_sums
from replicax.errors import ConfigError, StateError


@dataclasses.dataclass(frozen=True)
class Program:
    """The step and the score of one model on one mesh, traced when first run."""

    configuration: Configuration
    mesh: AnyMesh
    definition: Definition
    updater: Updater
    """The optimizer, restricted to trainable parameters, with averaging if requested."""
    shapes: TrainState
    """Shapes and dtypes of a state."""

    @cached_property
    def shardings(self) -> TrainState:
        """The shardings of a state."""
        state_layout, rows = self.configuration.state_layout, by_rows(self.mesh)
        where: TrainState = map_rows_of_state(
            lambda node: jax.tree.map(lambda _: rows, node),
            state_layout.shardings(self.shapes, self.mesh),
        )
        return self.configuration.between.shardings(where, self.shapes, state_layout, self.mesh)

    @cached_property
    def rows_of_state(self) -> int | None:
        """Rows of the state, including padding; None if it has none."""
        return next((rows.size for rows in rows_of_state(self.shapes.params)), None)

    @cached_property
    def objective(self) -> Objective:
        """The loss of the model on whole parameters."""
        config = self.configuration
        return Objective(self.definition, config.loss, config.precision, self.updater.read)

    @cached_property
    def split_objective(self) -> Objective:
        """`objective` on parameters split according to the layout."""
        config, whole = self.configuration, self.objective
        if self.mesh.shape.get(STAGE, 1) > 1:
            from replicax.core.pipeline.staged_objective import Staged

            return Staged(
                *(whole.definition, whole.loss, whole.precision, whole.read),
                mesh=self.mesh,
                shardings=self.shardings.params,
                micro_batches=config.accumulate,
                schedule=config.layout.schedule,
            )
        if not config.layout.splits_params:
            return whole
        from replicax.core.placement.fsdp_gather import Gathering

        axis = shard_axis(self.mesh)
        gathering = Gathering(self.shardings.params, axis, config.mode.per_replica)
        return dataclasses.replace(whole, gathering=gathering)

    @cached_property
    def derived(self) -> dict[Any, Any]:
        """Results that others derive from its trace and keep with it, by who and from what."""
        return {}

    @cached_property
    def step(self) -> StepProgram:
        """The step, as the mode builds it.

        `ConfigError` if the layout, the reduction and the optimizer are incompatible.
        """
        return self.configuration.between.step(self)

    @cached_property
    def steps(self) -> StepProgram | None:
        """The step on each of several batches in one program; None if a step takes several."""
        return self.step.repeated() if isinstance(self.step, Jitted) else None

    def step_spec(self) -> StepSpec:
        """Return what the mode builds the step of."""
        config = self.configuration
        if config.step is None:
            parts = self._built_in_step()
        else:
            out = self.shardings, replicated(self.mesh), by_rows(self.mesh)
            parts = self._parts("step", self.custom_step, out, out, config.reduction)
        options = config.options(self.mesh) or None
        return dataclasses.replace(parts, donate=config.donate, compiler_options=options)

    def inner(self, between: Between, wrap: Callable[[Apply], Apply]) -> "Program":
        """Return the program of the steps that update only the job's own part of a state."""
        shapes = self.configuration.between.inner_shapes(self.shapes)
        config = dataclasses.replace(self.configuration, between=between, wrap_apply=wrap)
        return dataclasses.replace(self, configuration=config, shapes=shapes)

    @cached_property
    def score(self) -> CompiledFunction[dict[str, Any]]:
        """The function `(state, batch) -> sums of loss and metrics`, as the mode builds it."""
        everywhere = replicated(self.mesh)
        sums = partial(score, objective=self.split_objective)
        parts = self._parts("score", sums, everywhere, everywhere, REDUCTIONS["float32"])
        return self.configuration.between.built(parts, self.configuration.mode.build)

    @cached_property
    def custom_step(self) -> "partial[StepResult]":
        """The custom step as a `ReplicaFunction`, which returns state, metrics and rows."""
        config, definition = self.configuration, self.definition
        if jax.tree.leaves(self.shapes.reduction):
            raise ConfigError(
                f"step= with reduction={config.names()['reduction']!r}, which keeps state for one "
                "sum between steps; a custom step may have several sums: use 'float32' or "
                "'bfloat16'"
            )
        assert config.step is not None
        assert isinstance(definition, CustomState)
        return partial(
            custom_update,
            step=config.step,
            definition=definition,
            precision=config.precision,
            apply=config.wrapped(keep),
        )

    def _built_in_step(self) -> StepSpec:
        config, mesh, shards = self.configuration, self.mesh, None
        if config.precision.scales and jax.tree.leaves(self.shapes.reduction):
            raise ConfigError(
                f"precision='float16' with reduction={config.names()['reduction']!r}, which keeps "
                "a part of the scaled gradient while the loss scale may change: use "
                "precision='bfloat16', or reduction='float32'"
            )
        gradient = None
        everywhere: Any = replicated(mesh)
        rows: Any = by_rows(mesh)
        if config.mode.per_replica and config.layout.splits_optimizer:
            whole = config.state_layout.gradient_shardings(self.shapes.params, mesh)
            gradient = only_read(whole, self.updater.read)
            shards = shards_of(gradient, mesh, summed=config.layout.splits_params)
        total = StepSums(everywhere if gradient is None else gradient, everywhere, rows, everywhere)
        sums: ReplicaSums = partial(step_sums, objective=self.split_objective)
        parts = self._parts(
            "step",
            sums,
            (total, everywhere, rows),
            (self.shardings, everywhere, rows),
            config.reduction,
            shards,
        )
        apply = config.wrapped(partial(apply_gradient, updater=self.updater))
        if config.precision.scales:
            apply = unscaling(apply)
            apply = plain(apply) if config.wrap_apply is None else apply
        return dataclasses.replace(parts, apply=apply, gradient=gradient)

    def _parts(
        self,
        name: str,
        sums: ReplicaFunction[Any],
        total: PyTree,
        out: PyTree,
        reduction: Reduction,
        shards: GradientShards | None = None,
    ) -> StepSpec:
        config, mode = self.configuration, self.configuration.mode
        recorded = {} if config.tuning is None else config.tuning.usual
        return StepSpec(
            name=name,
            sums=sums,
            objective=self.objective,
            mesh=self.mesh,
            layout=config.state_layout,
            shapes=self.shapes,
            state=self.shardings,
            total=total,
            out=out,
            wrap=mode.wrap,
            accumulator=config.accumulator(self.mesh),
            reduction=reduction,
            reduce=mode.reduce(reduction, shards),
            names_replicas=self.updater.names_replicas and mode.per_replica,
            micro_shards=config.micro_shards,
            compiler_options={**options_on(self.mesh), **recorded},
            in_flight=config.job.in_flight,
            exchange=config.between.exchange,
        )

    def scoring(self, loss: LossFunction) -> "Program":
        """Return this program with `loss` for evaluation, unaccumulated, as it may gather rows."""
        check_loss(loss)
        config = dataclasses.replace(self.configuration, loss=loss, step=None, accumulate=1)
        return dataclasses.replace(self, configuration=config)

    @property
    def split(self) -> Split:
        """The division of a batch into replicas and micro-batches."""
        return self.configuration.split(self.mesh)

    @cached_property
    def batches(self) -> BatchPlacement:
        """How batches are padded and placed."""
        return BatchPlacement(self.mesh, self.split, self.rows_of_state)

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
        state: TrainState = self._create(params, extras, np.uint32(seed))
        return state

    @cached_property
    def _create(self) -> Callable[..., TrainState]:
        create = partial(_first_state, self.configuration, self.mesh, self.updater, self.definition)
        return jax.jit(create, out_shardings=self.shardings, compiler_options=options_on(self.mesh))

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

    def averaged(self, state: TrainState) -> TrainState:
        """Return `state`, which was checked, with its parameters replaced by their average."""
        with self.configuration.dispatch_context():
            average = jax.jit(
                average_of,
                out_shardings=self.shardings.params,
                compiler_options=options_on(self.mesh),
            )
            return dataclasses.replace(state, params=average(state.opt_state, state.params))

    def abstract_state(self) -> TrainState:
        """Return the shapes and shardings of a state."""
        abstract: TrainState = jax.tree.map(
            lambda leaf, sharding: leaf.update(sharding=sharding), self.shapes, self.shardings
        )
        return abstract


def parts_of(state: TrainState, configuration: Configuration, mesh: AnyMesh) -> SplitModel:
    """Return the parts of the model of a state, of any configuration; its arrays as shapes."""
    if (definition := state.definition.value) is None:
        raise StateError(
            "this DataParallel has no model yet, and the state, which was pickled or put together "
            "by hand, names none: call dp.abstract_state(model) once"
        )
    params, extras = jax.eval_shape(lambda parts: parts, (state.params, state.extras))
    return definition, padded_rows(params, configuration.split(mesh).padded), extras


def _first_state(
    configuration: Configuration,
    mesh: AnyMesh,
    updater: Updater,
    definition: Definition,
    params: PyTree,
    extras: PyTree,
    seed: jax.Array,
) -> TrainState:
    replicas = replica_count(mesh)
    of_one = configuration.reduction.init(only_read(params, updater.read))
    state = TrainState(
        step=jnp.int32(0),
        params=params,
        opt_state=updater.optimizer.init(params),
        extras=extras,
        seed=jnp.uint32(seed),
        reduction=jax.tree.map(
            lambda leaf: jnp.broadcast_to(leaf, (replicas, *leaf.shape)), of_one
        ),
        scale=first_scale() if configuration.precision.scales else (),
        definition=Uncompared(definition),
    )
    return configuration.between.first_state(state, updater, replicas)


def program_of(
    configuration: Configuration,
    model: TrainState | SplitModel,
    mesh: AnyMesh,
    known: Program | None,
) -> Program:
    """Return `known` if it is the program of `model` on `mesh`, otherwise a new one.

    `model` is the parts of a model, or a state; arrays or their shapes.
    """
    if isinstance(model, TrainState):
        known = known or program_of(configuration, parts_of(model, configuration, mesh), mesh, None)
        definition, updater = known.definition, known.updater
        shapes = jax.eval_shape(lambda state: state, model)
    else:
        definition, params, extras = model
        config = configuration
        updater = updater_of(config.optimizer, config.trainable, config.ema, definition, params)
        create = partial(_first_state, configuration, mesh, updater, definition)
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
