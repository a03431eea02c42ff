"""What was configured, and a model -> the step and the score, as functions ready to be compiled."""

import dataclasses
from collections.abc import Callable
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from replicax.core.accumulate import Accumulator, Apply, Sequential
from replicax.core.average import average_of, check_decay
from replicax.core.batch import Batch, Share, described, host_rows, pad, row_count
from replicax.core.checks import check_loss, check_optimizer, check_outside_jit, check_own_step
from replicax.core.feed import Split
from replicax.core.job import Alone, Job
from replicax.core.layout import Layout, Rules, as_layout, check_axes, on_devices_of
from replicax.core.mesh import (
    AnyMesh,
    by_rows,
    check_mesh,
    check_processes,
    make_mesh,
    replica_count,
    replicated,
)
from replicax.core.models.definition import Definition, Parts, PyTree
from replicax.core.models.pytree import OwnState, split_pytree
from replicax.core.models.split import split_model
from replicax.core.modes import Mode, as_mode, lift
from replicax.core.objective import LossFunction, Objective, only_read
from replicax.core.optimizer import Updater, updater
from replicax.core.own import StepFunction, keep, own_update
from replicax.core.precision import Precision
from replicax.core.reduction import REDUCTIONS, Reduction, as_reduction
from replicax.core.trainable import Trainable
from replicax.core.update import Metrics, TrainState, apply_gradient, create, score, update
from replicax.errors import ConfigError, StateError


@dataclasses.dataclass(frozen=True)
class Configuration:
    """What a `DataParallel` was made of; see there."""

    loss: LossFunction
    optimizer: optax.GradientTransformation
    step: StepFunction | None
    mesh: Mesh
    mode: Mode
    layout: Layout
    accumulate: int
    micro_shards: int
    precision: Precision
    reduction: Reduction
    trainable: Trainable
    ema: float | None
    donate: bool
    job: Job
    wrap_apply: Callable[[Apply], Apply] | None = None
    """Wraps the optimizer's part of the step, to skip bad ones say."""

    def names(self) -> dict[str, Any]:
        """Return what was chosen, by name, as JSON has it."""
        chosen = {
            "mode": self.mode.name,
            "layout": self.layout.name,
            "accumulate": self.accumulate,
            "micro_shards": self.micro_shards if self.mode.bitwise else None,
            "precision": self.precision.name,
            "reduction": getattr(self.reduction, "name", type(self.reduction).__name__),
        }
        if self.trainable is not None:
            chosen["trainable"] = str(self.trainable)
        if self.step is not None:
            chosen["step"] = getattr(self.step, "__qualname__", type(self.step).__name__)
        return chosen if self.ema is None else {**chosen, "ema": self.ema}

    def split_model(self, model: Any) -> Parts:
        """Return the definition, params and extras of a model, or of the state of an own step."""
        if self.step is None:
            return split_model(model)
        definition, params, _ = split_pytree(model, OwnState)
        return definition, params, {}

    def accumulator(self, mesh: AnyMesh) -> Accumulator:
        """Return what adds up a replica's micro-batches on `mesh`."""
        return self.mode.accumulator(self.accumulate, self.micro_shards, mesh, self.reduction)

    def updater(self, definition: Definition, params: PyTree) -> Updater:
        """Return what updates a model's parameters, arrays or their shapes."""
        return updater(self.optimizer, self.trainable, self.ema, definition, params)

    def split(self, mesh: AnyMesh) -> Split:
        """Return how a batch is divided on `mesh`: over replicas, then over micro-batches."""
        replicas = replica_count(mesh)
        return Split(replicas, self.accumulator(mesh).micro_batches(replicas))


_NO_OPTIMIZER = optax.identity()


def _no_loss(*_: Any) -> Any:
    raise ConfigError(
        "there is a step and no loss to evaluate with: give evaluate(state, batches, loss=loss), "
        "or DataParallel(loss, step=step)"
    )


def configure(
    *,
    mesh: Mesh | None,
    mode: str | Mode,
    layout: str | Rules | Layout,
    precision: str | Precision,
    reduction: str | Reduction,
    job: Job | None,
    **rest: Any,
) -> Configuration:
    """Return the configuration of a `DataParallel`'s arguments, names replaced by values."""
    mode, layout = as_mode(mode), as_layout(layout)
    if rest["step"] is None:
        check_loss(rest["loss"])
        check_optimizer(rest["optimizer"])
    else:
        if rest["optimizer"] is _NO_OPTIMIZER:  # of a configuration that is replaced
            rest["optimizer"] = None
        check_own_step(layout=layout, **rest)
        rest |= {"loss": rest["loss"] or _no_loss, "optimizer": _NO_OPTIMIZER}
    check_decay(rest["ema"])
    job = Alone() if job is None else job
    if mesh is None:
        most = mode.most_devices
        mesh = make_mesh(devices=None if most is None else jax.devices()[:most])
    mesh = check_mesh(mesh)
    check_processes(mesh, job)
    mode.check(mesh, layout)
    check_axes(layout, mesh)
    if rest["accumulate"] < 1:
        raise ConfigError(
            f"accumulate={rest['accumulate']}; a step has at least 1 micro-batch: raise it"
        )
    configuration = Configuration(
        mesh=mesh,
        mode=mode,
        layout=layout,
        precision=precision if isinstance(precision, Precision) else Precision(precision),
        reduction=as_reduction(reduction),
        job=job,
        **rest,
    )
    configuration.accumulator(mesh)
    mode.reduce(configuration.reduction)
    return configuration


@dataclasses.dataclass(frozen=True)
class Program:
    """The step and the score of one model on one mesh."""

    configuration: Configuration
    mesh: AnyMesh
    definition: Definition
    objective: Objective
    shapes: TrainState
    """Shapes and dtypes of a state."""
    shardings: TrainState
    """Where its arrays live."""
    updater: Updater
    """The optimizer, on what trains, with the average that is wanted."""
    replica_step: Callable[..., tuple[TrainState, Metrics]]
    """`step` of one replica's view: `(state, batch, axis)`, and its parts by keyword."""
    step: Any
    """A `jax.jit` function `(state, batch) -> (state, metrics)`."""

    @cached_property
    def score(self) -> Any:
        """A `jax.jit` function `(state, batch) -> sums of loss and metrics`."""
        config, mesh, mode = self.configuration, self.mesh, self.configuration.mode
        evaluation = partial(
            score,
            objective=self.objective,
            accumulator=config.accumulator(mesh) if mode.bitwise else Sequential(),
            reduce=mode.reduce(REDUCTIONS["float32"]),
        )
        return lift(evaluation, mode, mesh, self.shardings, by_rows(mesh), replicated(mesh))

    def scoring(self, loss: LossFunction) -> "Program":
        """Return this one with `loss` in evaluation, and no step but that."""
        check_loss(loss)
        return dataclasses.replace(
            self,
            configuration=dataclasses.replace(self.configuration, step=None),
            objective=dataclasses.replace(self.objective, loss=loss),
        )

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
        rows = jax.tree.map(lambda _: by_rows(self.mesh), batch)
        wanted = jax.tree.leaves((self.shardings, rows))
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

    return partial(create, optimizer=updater.optimizer, reduction=of_each_replica)


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
    shardings = config.layout.shardings(shapes, mesh)
    split = shardings.params if config.layout.splits_params else None
    objective = Objective(definition, config.loss, config.precision, updater.read, split)
    accumulator = config.accumulator(mesh)
    wrap = config.wrap_apply or (lambda apply: apply)
    if config.step is None:
        written = partial(update, objective=objective)
        apply = wrap(partial(apply_gradient, updater=updater))
    else:
        if jax.tree.leaves(shapes.reduction):
            raise ConfigError(
                f"step= with reduction={config.reduction!r}, which remembers one sum from step to "
                "step; a step of one's own may sum several: use 'float32' or 'bfloat16'"
            )
        assert isinstance(definition, OwnState)
        written, apply = partial(own_update, step=config.step, definition=definition), wrap(keep)
        written = partial(written, precision=config.precision)
    reduce = mode.reduce(config.reduction)
    step = partial(written, accumulator=accumulator, reduce=reduce, apply=apply)
    out = (shardings, replicated(mesh))
    return Program(
        configuration=config,
        mesh=mesh,
        definition=definition,
        objective=objective,
        shapes=shapes,
        shardings=shardings,
        updater=updater,
        replica_step=step,
        step=lift(step, mode, mesh, shardings, by_rows(mesh), out, donate=config.donate),
    )
