"""Build the step and the score of a configuration and a model, ready to be compiled."""

import dataclasses
from functools import cached_property, partial
from typing import Any

import jax
import numpy as np

from replicax.core.batch_placement import BatchPlacement
from replicax.core.begun_state import create_state
from replicax.core.between.arithmetic import Weighing, arithmetic_of
from replicax.core.between.coded_sums import CodedSums
from replicax.core.between.exchanged_step import ExchangedStep
from replicax.core.between.islands import Islands
from replicax.core.between.round_step import RoundStep
from replicax.core.between.transports import BetweenJobs, InnerJob, OverMesh, OwnSpan, Transport
from replicax.core.built_in_step import optimizer_update, split_objective
from replicax.core.config import Configuration
from replicax.core.custom.custom_step import custom_update, keep
from replicax.core.data.batch import Batch
from replicax.core.data.feed import Split
from replicax.core.data.per_row import map_rows_of_state, padded_rows, rows_of_state
from replicax.core.first_step.argument_checks import check_kind, check_loss
from replicax.core.ground.leaves import PyTree
from replicax.core.ground.train_state import TrainState
from replicax.core.models.definition import Definition, SplitModel
from replicax.core.models.pytree import CustomState
from replicax.core.modes.step_builder import Jitted, StepParts
from replicax.core.placement.layout import on_devices_of
from replicax.core.placement.mesh import AnyMesh, batch_shardings, by_rows, options_on, replicated
from replicax.core.step.base import (
    CompiledFunction,
    ReplicaFunction,
    ReplicaSums,
    StepProgram,
    StepResult,
    StepSums,
)
from replicax.core.step.objective import LossFunction, Objective, only_read
from replicax.core.step.optimizer import Updater, average_of
from replicax.core.step.optimizer import updater as updater_of
from replicax.core.step.reduction import REDUCTIONS, GradientShards, Reduction, shards_of
from replicax.core.step.update import score, step_sums
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
        placing, islands = self.configuration.placing, self.configuration.islands
        rows, found = by_rows(self.mesh), placing.shardings(self.shapes, self.mesh)
        where: TrainState = map_rows_of_state(
            lambda node: jax.tree.map(lambda _: rows, node), found
        )
        if islands is None or islands.sends_gradients:
            return where
        own = jax.tree.map(lambda _: by_rows(self.mesh), self.shapes.islands)
        if islands.axis is None:
            own = jax.tree.map(lambda _: replicated(self.mesh), own)
            inner = placing.shardings(self.shapes.islands.inner, self.mesh)
            own = dataclasses.replace(own, inner=inner)
        return dataclasses.replace(where, islands=own)

    @cached_property
    def own_shapes(self) -> TrainState:
        """Shapes of the state that an island's steps update: with rounds its own, else `shapes`."""
        islands = self.configuration.islands
        if islands is None or islands.sends_gradients:
            return self.shapes
        inner: TrainState = self.shapes.islands.inner
        if islands.axis is None:
            return inner
        of_one: TrainState = jax.tree.map(lambda leaf: leaf.update(shape=leaf.shape[1:]), inner)
        return of_one

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
        return split_objective(self.objective, self.configuration, self.mesh, self.shardings)

    @cached_property
    def step(self) -> StepProgram:
        """The step, as the mode builds it.

        `ConfigError` if the layout, the reduction and the optimizer are incompatible.
        """
        islands = self.configuration.islands
        if islands is None:
            return self._built(self._step_parts())
        if not islands.sends_gradients:
            return self._round_step(islands)
        parts, config = self._step_parts(), self.configuration
        coded = CodedSums(islands.codec, self.mesh, config.job)
        return ExchangedStep(parts, OwnSpan(config.job, anew=True), config.mode.build(parts), coded)

    @cached_property
    def steps(self) -> StepProgram | None:
        """The step on each of several batches in one program; None if a step takes several."""
        return self.step.repeated() if isinstance(self.step, Jitted) else None

    def _step_parts(self) -> StepParts:
        config = self.configuration
        parts = self._built_in_step() if config.step is None else self._custom_step()
        options = config.options(self.mesh) or None
        return dataclasses.replace(parts, donate=config.donate, compiler_options=options)

    def _round_step(self, islands: Islands) -> RoundStep:
        """Return steps of each island's own state, with rounds between them."""
        config, job = self.configuration, self.configuration.job
        own = OwnSpan(job)
        inner = dataclasses.replace(
            config,
            islands=None,
            job=InnerJob(job, own),
            wrap_apply=Weighing(config.wrap_apply),
        )
        program = dataclasses.replace(self, configuration=inner, shapes=self.own_shapes)
        arithmetic = arithmetic_of(islands, self.updater, self.shapes.params)
        transport: Transport
        if islands.axis is None:
            transport = BetweenJobs(program.step, arithmetic, self.mesh, job)
        else:
            transport = OverMesh(program._step_parts(), arithmetic)
        return RoundStep(arithmetic, transport, self.shardings, own.begin)

    @cached_property
    def score(self) -> CompiledFunction[dict[str, Any]]:
        """The function `(state, batch) -> sums of loss and metrics`, as the mode builds it."""
        everywhere = replicated(self.mesh)
        sums = partial(score, objective=self.split_objective)
        parts = self._parts("score", sums, everywhere, everywhere, REDUCTIONS["float32"])
        return self._built(parts)

    def _built(self, parts: StepParts) -> CompiledFunction[Any]:
        mode = self.configuration.mode
        if parts.exchange is None or mode.bitwise:
            return mode.build(parts)
        return ExchangedStep(parts, parts.exchange, mode.build(parts))

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

    def _custom_step(self) -> StepParts:
        config, rows = self.configuration, by_rows(self.mesh)
        out = self.shardings, replicated(self.mesh), rows
        if config.job.exchange is not None and not config.mode.bitwise:
            raise ConfigError(
                f"step= in mode={config.mode.name!r} with islands, which exchange the sums of a "
                "step; only mode='exact' finds them in a custom step: use mode='exact'"
            )
        return self._parts("step", self.custom_step, out, out, config.reduction)

    def _built_in_step(self) -> StepParts:
        config, mesh, shards = self.configuration, self.mesh, None
        if config.precision.scales and jax.tree.leaves(self.shapes.reduction):
            raise ConfigError(
                f"precision='float16' with reduction={config.names()['reduction']!r}, which keeps "
                "a part of the scaled gradient while the loss scale may change: use "
                "precision='bfloat16', or reduction='float32'"
            )
        gradient, everywhere = None, replicated(mesh)
        if config.mode.per_replica and config.layout.splits_optimizer:
            whole = config.placing.gradient_shardings(self.shapes.params, mesh)
            gradient = only_read(whole, self.updater.read)
            shards = shards_of(gradient, mesh, summed=config.layout.splits_params)
        weighted: Any = everywhere
        rows: Any = by_rows(mesh)
        gradient_where = everywhere if gradient is None else gradient
        total = StepSums(gradient_where, weighted, rows, everywhere)  # type: ignore[arg-type]
        sums: ReplicaSums = partial(step_sums, objective=self.split_objective)
        parts = self._parts(
            "step",
            sums,
            (total, everywhere, by_rows(mesh)),
            (self.shardings, everywhere, rows),
            config.reduction,
            shards,
        )
        apply = optimizer_update(config, self.updater)
        return dataclasses.replace(parts, apply=apply, gradient=gradient)

    def _parts(
        self,
        name: str,
        sums: ReplicaFunction[Any],
        total: PyTree,
        out: PyTree,
        reduction: Reduction,
        shards: GradientShards | None = None,
    ) -> StepParts:
        config, mode = self.configuration, self.configuration.mode
        return StepParts(
            name=name,
            sums=sums,
            apply=None,
            objective=self.objective,
            mesh=self.mesh,
            layout=config.placing,
            shapes=self.shapes,
            state=self.shardings,
            total=total,
            out=out,
            gradient=None,
            wrap=mode.wrap,
            accumulator=config.accumulator(self.mesh),
            reduction=reduction,
            reduce=mode.reduce(reduction, shards),
            names_replicas=self.updater.names_replicas and mode.per_replica,
            micro_shards=config.micro_shards,
            donate=False,
            compiler_options=options_on(self.mesh),
            in_flight=config.job.in_flight,
            exchange=config.job.exchange,
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
        create = partial(create_state, self.configuration, self.mesh, self.updater, self.definition)
        make = jax.jit(create, out_shardings=self.shardings, compiler_options=options_on(self.mesh))
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

    def averaged(self, state: TrainState) -> TrainState:
        """Return `state` with its parameters replaced by their average."""
        check_kind(state)
        with self.configuration.undisturbed():
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
        create = partial(create_state, configuration, mesh, updater, definition)
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
