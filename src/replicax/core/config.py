"""The configuration of a `DataParallel`: its arguments as values."""

import dataclasses
import os
from collections.abc import Callable, Mapping
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import optax
from jax.sharding import Mesh

from replicax.core.between.choice import as_between
from replicax.core.between.rounds import Rounds
from replicax.core.between.seam import Between
from replicax.core.custom.custom_step import StepFunction
from replicax.core.data.feed import Split
from replicax.core.data.per_row import padded_state, rows_of_state
from replicax.core.first_step.argument_checks import check_custom_step, check_loss, check_optimizer
from replicax.core.ground.job import PROCESS_JOB, Alone, Job
from replicax.core.ground.precision import Precision, as_precision
from replicax.core.ground.traced_for import cuda_capability
from replicax.core.models.definition import SplitModel
from replicax.core.models.leaf_checks import check_leaves
from replicax.core.models.pytree import CustomState, split_pytree
from replicax.core.models.split import split_model
from replicax.core.modes.mode_table import Mode, as_mode
from replicax.core.placement.dispatch_context import Context, dispatch_context, in_own_mesh
from replicax.core.placement.layout import Layout, as_layout, check_axes
from replicax.core.placement.mesh import (
    STAGE,
    AnyMesh,
    check_mesh,
    check_processes,
    make_mesh,
    options_on,
    platform_of,
    replica_count,
)
from replicax.core.step.base import Accumulator, Apply
from replicax.core.step.objective import LossFunction
from replicax.core.step.optimizer import Trainable, check_decay
from replicax.core.step.reduction import REDUCTIONS, Reduction, as_reduction
from replicax.errors import ConfigError
from replicax.known_wrong.findings import refuse_known_wrong

if TYPE_CHECKING:
    from replicax.core.modes.exact.tuning import Tuning


@dataclasses.dataclass(frozen=True)
class Configuration:
    """The arguments of a `DataParallel` as values, documented there."""

    arguments: Mapping[str, Any] = dataclasses.field(compare=False, repr=False)
    """The arguments as they were given, by name."""
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
    compiler_options: Mapping[str, Any] | None
    tuning: "Tuning | None"
    """Recorded kernels, in a mode that is bitwise reproducible."""
    rounds: Rounds | None
    between: Between
    """The exchange with other jobs, or of replicas that train on their own."""
    wrap_apply: Callable[[Apply], Apply] | None = None
    """Wraps the optimizer part of the step, for example to skip bad steps."""
    examinations: dict[Any, Any] | None = dataclasses.field(default=None, compare=False, repr=False)
    """The examinations of the loss, if all copies are of one model; None if each has its own."""

    def in_own_mesh(self) -> Context:
        """Return a context without any mesh of the caller's."""
        return in_own_mesh(self.mesh, named=self.mode.partitions)

    @cached_property
    def dispatch_context(self) -> Callable[[], Context]:
        """Returns a context in which to trace and dispatch the programs."""
        named, compiled = self.mode.partitions, self.mode.bitwise
        return partial(dispatch_context, self.mesh, self.job.in_flight, named, compiled)

    def options(self, mesh: AnyMesh) -> dict[str, Any]:
        """Return the compiler options for a step on `mesh`.

        They are those that avoid known wrong numbers, `chosen_options`, and recorded kernels.
        """
        recorded = {} if self.tuning is None else self.tuning.complete
        return {**options_on(mesh), **self.chosen_options(mesh), **recorded}

    def chosen_options(self, mesh: AnyMesh) -> dict[str, Any]:
        """Return the options that were given, or the defaults of the devices of `mesh`."""
        if self.compiler_options is not None:
            return dict(self.compiler_options)
        overlaps = mesh.size > 1 and not self.mode.bitwise and cuda_capability() is not None
        return dict(_OVERLAP) if overlaps else {}

    def names(self) -> dict[str, Any]:
        """Return the chosen options by name, as JSON values."""
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
        if self.between.settings is not None:
            chosen["rounds"] = self.between.settings.names()
        if options := self.chosen_options(self.mesh):
            chosen["compiler_options"] = options
        if self.tuning is not None:
            chosen["tuning"] = self.tuning.digest
        return chosen if self.ema is None else {**chosen, "ema": self.ema}

    def split_model(self, model: Any, mesh: AnyMesh) -> SplitModel:
        """Return the definition, params and extras of a model, or of a custom step's state.

        Rows in a state are padded as a batch of so many is on `mesh`.
        """
        if self.step is None:
            from replicax.core.models.training_mode import for_training

            definition, params, extras = split_model(for_training(model))
            for arrays in (params, extras):
                check_leaves(arrays)
            return definition, params, extras
        definition, params, _ = split_pytree(model, CustomState)
        check_leaves(params)
        params = padded_state(params, self.split(mesh).padded)
        if self.between.reshared and rows_of_state(params):
            raise ConfigError(f"an rx.ByRow in the state with {self.between.reshared}: use one job")
        return definition, params, {}

    def accumulator(self, mesh: AnyMesh) -> Accumulator:
        """Return the accumulator of a replica's micro-batches on `mesh`."""
        return self.mode.accumulator(self.accumulate, self.micro_shards, mesh, self.reduction)

    @property
    def state_layout(self) -> Layout:
        """The layout used to place the arrays of a state."""
        shards = self.micro_shards if self.mode.bitwise else None
        return dataclasses.replace(self.layout, shards=shards)

    def wrapped(self, apply: Apply) -> Apply:
        """Return the optimizer part of the step, wrapped if configured."""
        return apply if self.wrap_apply is None else self.wrap_apply(apply)

    def split(self, mesh: AnyMesh) -> Split:
        """Return how a batch is split on `mesh`: over replicas, then over micro-batches."""
        replicas = replica_count(mesh)
        micro_batches = self.accumulator(mesh).micro_batches(replicas)
        return Split(replicas, micro_batches * self.between.parts)


_OVERLAP = {"xla_gpu_experimental_parallel_collective_overlap_limit": 8}
"""By default XLA runs one reduction at a time, and most are delayed to the end of the step."""
_NO_OPTIMIZER = optax.identity()


def _no_loss(*_: Any) -> Any:
    raise ConfigError(
        "step= is given without a loss to evaluate: use evaluate(state, batches, loss=loss), "
        "or DataParallel(loss, step=step)"
    )


def resolved(**given: Any) -> Configuration:
    """Return the configuration of arguments as given: names as values, defaults, all checked."""
    mode, layout = as_mode(given["mode"]), as_layout(given["layout"])
    precision = as_precision(given["precision"])
    if given["step"] is None:
        check_loss(given["loss"])
        check_optimizer(given["optimizer"])
    else:
        check_custom_step(given, layout, precision)
    check_decay(given["ema"])
    job = given["job"] or PROCESS_JOB.job or _lone_job(os.environ)
    mesh = _mesh(given["mesh"], mode, job)
    mode.check(mesh, layout)
    check_axes(layout, mesh)
    refuse_known_wrong(platform_of(mesh))
    between = as_between(
        given["rounds"],
        job=job,
        mode=mode,
        layout=layout,
        replicas=replica_count(mesh),
        micro_shards=given["micro_shards"],
        ema=given["ema"],
    )
    values = {
        "loss": given["loss"] or _no_loss,
        "optimizer": given["optimizer"] or _NO_OPTIMIZER,
        "mesh": mesh,
        "mode": mode,
        "layout": layout,
        "precision": precision,
        "reduction": as_reduction(given["reduction"]),
        "job": job,
        "between": between,
        "tuning": _tuning(given["tuning"], mode, mesh),
        "rounds": between.settings,
    }
    configuration = Configuration(**{**given, **values}, arguments=given)
    _check_split(configuration)
    configuration.accumulator(mesh)
    mode.reduce(configuration.reduction, None)
    return configuration


_ISLANDS = "REPLICAX_ISLANDS"
"""Set in each of several islands, as `replicax.islands.island_variables` says."""


def _lone_job(env: Mapping[str, str]) -> Job:
    """Return the job of a process that joined none; `ConfigError` if it is an island's."""
    if env.get(_ISLANDS):
        raise ConfigError(
            f"one of {env[_ISLANDS].count(',') + 1} islands ({_ISLANDS}) that has not joined the "
            "others, so that it would train alone: call rx.initialize() first"
        )
    return Alone()


def _tuning(path: str | Path | None, mode: Mode, mesh: Mesh) -> "Tuning | None":
    if path is None:
        return None
    from replicax.core.modes.exact.tuning import as_tuning  # few need it

    return as_tuning(path, mode, mesh)


def _mesh(mesh: Mesh | None, mode: Mode, job: Job) -> Mesh:
    if mesh is None:
        most = mode.most_devices
        mesh = make_mesh(devices=None if most is None else jax.devices()[:most])
    mesh = check_mesh(mesh)
    check_processes(mesh, job)
    return mesh


def _check_split(configuration: Configuration) -> None:
    """Raise `ConfigError` if stages or the layout split what the step needs whole."""
    stages = configuration.mesh.shape.get(STAGE, 1)
    if stages > 1 and configuration.step is not None:
        raise ConfigError(
            f"step= with a mesh of {stages} stages; pipeline stages split the loss, not a "
            "custom step: pass the loss instead, or use a mesh without stages"
        )
    mode, layout, reduction = (getattr(configuration, n) for n in ("mode", "layout", "reduction"))
    if configuration.step is not None and mode.per_replica and not layout.is_whole:
        raise ConfigError(
            f"step= with layout={layout.name!r} in mode={mode.name!r}, where a custom step "
            "would see only one replica's shard of its state: use mode='jit' or layout='replicated'"
        )
    if layout.splits_params and reduction != REDUCTIONS["float32"]:
        raise ConfigError(
            f"layout={layout.name!r} with reduction={configuration.names()['reduction']!r}; this "
            "layout reduces each layer's gradient in float32 as soon as it is computed: use "
            "'float32', or layout='zero1'"
        )
    if configuration.accumulate < 1:  # in `replace`, whose arguments no signature checks
        raise ConfigError(
            f"accumulate={configuration.accumulate}; a step needs at least 1 micro-batch: raise it"
        )
