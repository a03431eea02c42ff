"""`Configured`: the programs of a configuration, which may be compiled without running them."""

import dataclasses
from collections.abc import Callable
from typing import Any, Self

import jax
from jax.sharding import Mesh

from replicax.core.config import Configuration
from replicax.core.data.feed import Split
from replicax.core.first_step.argument_checks import check_is_state, check_shapes
from replicax.core.ground.train_state import TrainState
from replicax.core.models.definition import SplitModel
from replicax.core.placement.mesh import AnyMesh, check_mesh
from replicax.core.placement.undisturbed import of_one_thread
from replicax.core.program import Program, parts_of, program_of
from replicax.core.step.base import Apply
from replicax.errors import StateError


class Configured:
    """A configuration, and the programs of the models that were given to it.

    `rx.DataParallel` is its only subclass, and runs them; it is two classes so that each can be
    read by itself.
    """

    def __repr__(self) -> str:
        usual = {"accumulate": 1, "precision": "float32", "reduction": "float32"}
        names, devices = self.configuration.names().items(), self.mesh.devices
        chosen = [f"{name}={value!r}" for name, value in names if value != usual.get(name)]
        where = f"{devices.size} x {devices.flat[0].device_kind}"
        return f"DataParallel({', '.join([*chosen, where])})"

    def replace(self, **changes: Any) -> Self:
        """Return a copy with some arguments changed, which knows no model yet.

        With an `AbstractMesh`, the copy compiles for devices that need not exist and runs nothing.
        """
        other = object.__new__(type(self))
        chosen = {"mesh": self.mesh, "job": self.job, **changes}
        arguments = dataclasses.replace(self.configuration.arguments, **chosen)
        other._configure(arguments.resolved())
        return other

    @of_one_thread
    def wrapping(self, wrap: Callable[[Apply], Apply], state: TrainState) -> Self:
        """Return a cached copy whose optimizer part of the step is `wrap(apply)`.

        `wrap` is a module-level function; `state`, or its shapes, is this object's or `wrap`'s.
        """
        shapes = jax.eval_shape(lambda leaf: leaf, state)
        key = (wrap, jax.tree.structure(shapes))
        if key not in self._wrapped:
            other = self._wrapped[key] = self.replace(wrap_apply=wrap)
            other._program = program_of(other.configuration, shapes, self.mesh, self._program)
        return self._wrapped[key]

    @property
    def split(self) -> Split:
        """The split of a batch over replicas and micro-batches."""
        return self.configuration.split(self.mesh)

    @of_one_thread
    def program(self, model: Any, *, mesh: AnyMesh | None = None) -> Program:
        """Return the step and the evaluation of a model, without compiling anything.

        Args:
            model: as for `init`, or a `TrainState`; arrays or their shapes.
            mesh: of attached or described devices, or one that has only their number; default:
                `self.mesh`.
        """
        is_state = isinstance(model, TrainState)
        where = self.mesh if mesh is None else check_mesh(mesh)
        described = model if is_state else self.configuration.split_model(model, where)
        return program_of(self.configuration, described, where, self._program)

    @of_one_thread
    def lower(self, model: Any, batch: Any, *, mesh: Mesh | None = None) -> jax.stages.Lowered:
        """Lower the step for `mesh`, attached or described, without running or placing anything.

        Args:
            model: as for `init`, or a `TrainState`; arrays or their shapes.
            batch: a `Batch` or a pytree `[rows, ...]`; arrays or their shapes.
            mesh: default: `self.mesh`. `step` reuses what is compiled here for its arguments.
        """
        lowered: jax.stages.Lowered = self.trace(model, batch, mesh=mesh).lower()
        return lowered

    @of_one_thread
    def trace(self, model: Any, batch: Any, *, mesh: AnyMesh | None = None) -> jax.stages.Traced:
        """Trace as for `lower`; `replicax.analysis.flops.count_flops` reads its `jaxpr`."""
        program = self.program(model, mesh=mesh)
        placed = program.holds(model, batch)
        arguments = (model, batch) if placed else (program.shapes, program.batches.described(batch))
        traced: jax.stages.Traced = program.step.trace(*arguments)
        return traced

    def _configure(self, configuration: Configuration) -> None:
        self.configuration = chosen = configuration
        self.loss, self.optimizer, self.mesh = chosen.loss, chosen.optimizer, chosen.mesh
        self.mode, self.layout, self.precision = chosen.mode, chosen.layout, chosen.precision
        self.accumulate, self.micro_shards = chosen.accumulate, chosen.micro_shards
        self.reduction, self.donate, self.job = chosen.reduction, chosen.donate, chosen.job
        self._program: Program | None = None
        self._wrapped: dict[Any, Self] = {}

    def _adopt(self, parts: SplitModel) -> Program:
        """Return the program of a model, and keep it as this object's if it is the first."""
        program = program_of(self.configuration, parts, self.mesh, self._program)
        self._program = self._program or program
        return program

    @property
    def knows_model(self) -> bool:
        """Whether a model was given to it, by `init` or by a state."""
        return self._program is not None

    def _of(self, state: TrainState) -> Program:
        """Return the program of this object's model; the first state brings it, if not `init`."""
        if self._program is None:
            check_is_state(state)
            parts = parts_of(state, self.configuration, self.mesh)
            program = program_of(self.configuration, parts, self.mesh, None)
            check_shapes(dataclasses.replace(state, losses=()), program.shapes)
            self._program = program
        return self._program

    @property
    def _known(self) -> Program:
        if self._program is None:
            raise StateError(
                "this DataParallel has no model yet: write state = dp.init(model), or pass "
                "dp.abstract_state(model)"
            )
        return self._program
