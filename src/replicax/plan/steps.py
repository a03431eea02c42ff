"""Steps of any size for one target, compiled if possible and by formula otherwise."""

import dataclasses
import math
from collections.abc import Callable, Hashable
from functools import cache, cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr

from replicax.analysis.collectives import sums_bytes
from replicax.analysis.flops import count_flops
from replicax.analysis.schedule import Schedule, read_schedule
from replicax.core.data.per_row import with_rows
from replicax.core.data.rows import opened
from replicax.core.data_parallel import DataParallel
from replicax.core.ground.traced_for import cuda_capability, traced_for
from replicax.core.ground.train_state import owned_nodes
from replicax.core.modes.exact.fixed_tree import float_sums
from replicax.core.placement.mesh import (
    STAGE,
    AnyMesh,
    abstract_like,
    abstract_mesh,
    is_data_only,
    replica_count,
)
from replicax.core.placement.pipeline_schedules import SCHEDULES
from replicax.core.step.objective import only_read
from replicax.errors import CompilerError
from replicax.plan.compilation import Compilation, Compiler, TooLarge
from replicax.plan.compiler import DESCRIBED, compiler_for
from replicax.plan.exported import (
    BEFORE_CUDNN,
    ExportedStep,
    computes_again,
    export_step,
    keeping_everything,
    step_jaxpr,
)
from replicax.plan.memory_formula import MemoryFormula, memory_formula, shard_of_device, tree_bytes
from replicax.plan.planned import Need
from replicax.plan.target import ATTACHED, Target
from replicax.train.guarded import guarded

ShowProgress = Callable[[str], None]
HOPELESS = {"cpu": 2.0, "cuda": 2.0}
"""A step that needs this many times the memory by formula is not compiled, by platform. More than
the formula was ever wrong there, or a compiler saved by computing values again; on TPUs, which
lay out small arrays and fuse otherwise, the formula was three times too high."""


@dataclasses.dataclass(frozen=True)
class TargetStep:
    """A step for a target, and the result of compiling it."""

    dp: DataParallel
    need: Need
    formula: MemoryFormula
    program: ExportedStep | None = None
    """None without a compiler."""
    compilation: Compilation | None = None
    """None without a compiler, or if the compiler rejects the step."""

    @cached_property
    def schedule(self) -> Schedule | None:
        """The compiled schedule of one device."""
        if self.compilation is None:
            return None
        stages, parts = self.dp.mesh.shape.get(STAGE, 1), self.dp.accumulate
        working = {}
        if stages > 1:  # ticks in which a stage works one way, while others start or finish
            ticks = SCHEDULES[self.dp.layout.schedule](stages, parts) + parts + stages - 1
            working = {ticks: parts + stages - 1}
        return read_schedule(self.compilation.text, self.dp.mesh.shape, working)


class StepCache:
    """Steps of any size for one target, each made once and cached.

    Args:
        model: as for `DataParallel.lower`; arrays or their shapes.
        batch: the pytree `[rows, ...]` from which batches of any number of rows are derived.
        target: the devices.
        compiler: the target's compiler; None to use the formula.
        show: called with a line of progress before each step.
    """

    def __init__(
        self, model: Any, batch: Any, target: Target, compiler: Compiler | None, show: ShowProgress
    ) -> None:
        self.target, self.compiler = target, compiler
        self._model, self._batch, self._show = model, batch, show
        self._steps: dict[tuple[DataParallel, int, bool], TargetStep] = {}
        self.recomputed_share = cache(self._recomputed_share)
        self._traces: dict[tuple[Hashable, ...], tuple[Jaxpr, int]] = {}
        self._gradients: dict[tuple[Hashable, ...], tuple[Jaxpr, int]] = {}
        self._formulas: dict[tuple[DataParallel, int], MemoryFormula] = {}

    def formula(self, dp: DataParallel, rows: int) -> MemoryFormula:
        """Return the memory formula for `rows` per replica."""
        if (dp, rows) not in self._formulas:
            batch, platform = self._rows(dp, rows), self.target.chip.platform
            # Without its compiler, kernels specific to a described GPU cannot be traced either.
            with traced_for(self._capability if self.compiler else None):
                sized, known = self._sized(batch), self._gradients
                formula = memory_formula(dp, sized, batch, platform=platform, known=known)
            self._formulas[dp, rows] = formula
        return self._formulas[dp, rows]

    def step(
        self, dp: DataParallel, rows: int, purpose: str = "", *, without_cudnn: bool = False
    ) -> TargetStep:
        """Return the step with `rows` per replica, with or without cuDNN kernels.

        `purpose` begins the line passed to `show`.

        Raises:
            CompilerError: see `Compiler.compile`.
            ConfigError: see `export_step`.
        """
        key = dp, rows, without_cudnn
        if key not in self._steps:
            self._show(f"{purpose}{', ' if purpose else ''}{rows:,} rows per {holder(dp.mesh)}")
            capability = self._capability
            if capability is not None and without_cudnn:
                capability = min(capability, BEFORE_CUDNN)
            self._steps[key] = self._make(dp, rows, capability)
        return self._steps[key]

    def by_formula(self, dp: DataParallel, rows: int) -> TargetStep:
        """Return the step with `rows` per replica, by formula even with a compiler."""
        formula, room = self.formula(dp, rows), self.target.chip.usable_bytes
        fits = room is None or formula.total <= room
        return TargetStep(dp, Need(rows, formula.total, fits, False), formula)

    def is_hopeless(self, dp: DataParallel, rows: int) -> bool:
        """Whether the formula is far enough beyond the memory to leave the compiler out."""
        room = self.target.chip.usable_bytes
        times = HOPELESS.get(self.target.chip.platform, math.inf)
        return room is not None and self.formula(dp, rows).total > times * room

    def _make(self, dp: DataParallel, rows: int, capability: float | None) -> TargetStep:
        if self.compiler is None or self.is_hopeless(dp, rows):
            return self.by_formula(dp, rows)
        formula, room = self.formula(dp, rows), self.target.chip.usable_bytes
        batch, platform = self._rows(dp, rows), self.target.chip.platform
        program = export_step(dp, self._sized(batch), batch, platform, capability)
        compiled = self.compiler.compile(program)
        if isinstance(compiled, TooLarge):
            # A compiler may stop at the first total that is too large.
            least = max(compiled.needed_bytes or 0, compiled.available_bytes or 0, formula.total)
            return TargetStep(dp, Need(rows, least, False, True), formula, program)
        peak = compiled.memory.peak
        temporaries = max(0, peak - compiled.memory.arguments)
        need = Need(rows, peak, room is None or peak <= room, True, temporaries)
        return TargetStep(dp, need, formula, program, compiled)

    def needs(self, dp: DataParallel) -> tuple[Need, ...]:
        """Return the memory of all steps of `dp` made so far, by rows."""
        needs = [
            made.need
            for (owner, _, without), made in self._steps.items()
            if owner is dp and not without
        ]
        return tuple(sorted(needs, key=lambda need: need.rows))

    def flops(self, dp: DataParallel, rows: int) -> float:
        """Return the FLOPs of products and convolutions on one device, with `rows` per replica."""
        size = dp.mesh.size
        return self._traced(dp, rows)[1] / size + self._repeated(dp, rows) * (1 - 1 / size)

    def _repeated(self, dp: DataParallel, rows: int) -> int:
        """Return the FLOPs of products of the optimizer, if each device does all of them."""
        if dp.configuration.step is not None:
            return 0
        program = dp.program(self._sized(self._rows(dp, rows)))
        params, state = program.shapes.params, program.shapes.opt_state
        if dp.layout.splits_optimizer and owned_nodes(state):
            return 0
        value = {"value": jnp.float32(0)} if program.updater.takes_value else {}
        update = partial(program.updater.optimizer.update, **value)
        traced = jax.make_jaxpr(update)(params, state, params)
        return count_flops(traced.jaxpr, self.target.chip.platform)

    def _recomputed_share(self, dp: DataParallel, rows: int) -> float | None:
        """Return the share of `flops` that is recomputation; None if it cannot be determined."""
        if not computes_again(self._traced(dp, rows)[0]):
            return 0.0
        if dp.configuration.step is not None:
            return None
        try:
            least = self.flops(dp.replace(loss=keeping_everything(dp.loss)), rows)
        except Exception:  # from the user's loss, such as a model mutated while tracing
            return None
        return 1 - least / self.flops(dp, rows)

    def _traced(self, dp: DataParallel, rows: int) -> tuple[Jaxpr, int]:
        """Return the step on all devices, and the FLOPs of its products and convolutions."""
        chosen, batch = dp.configuration, self._rows(dp, rows)
        # However a batch is split, and in any precision, its products are the same.
        key = chosen.loss, chosen.step, chosen.optimizer, rows * replica_count(dp.mesh)
        if key not in self._traces:
            if not is_data_only(dp.mesh):  # devices of one replica together compute what one would
                dp = dp.replace(mesh=abstract_mesh(replica_count(dp.mesh)))
            jaxpr = step_jaxpr(dp, self._sized(batch), batch)
            self._traces[key] = jaxpr, count_flops(jaxpr, self.target.chip.platform)
        return self._traces[key]

    def _sized(self, batch: Any) -> Any:
        """Return the model, or a custom step's state with as many rows as `batch`."""
        return with_rows(self._model, opened(batch).count)

    def sums_bytes(self, dp: DataParallel, metrics: int) -> int:
        """Return the bytes of the sums that each device of a replica reduces; see `sums_bytes`."""
        program = dp.program(self._model)
        layout = dataclasses.replace(dp.layout, splits_params=False)
        where = layout.shardings(program.shapes, dp.mesh).params
        params = jax.tree.map(shard_of_device, program.shapes.params, where)
        trained = jax.tree.leaves(only_read(params, program.objective.read))
        return sums_bytes(trained, metrics, dp.reduction, replica_count(dp.mesh))

    def island_sums_bytes(self, dp: DataParallel, metrics: int) -> int:
        """Return the bytes of the sums of a part, which islands exchange whole."""
        program = dp.program(self._model)
        trained = jax.tree.leaves(only_read(program.shapes.params, program.objective.read))
        statistics = jax.eval_shape(float_sums, program.shapes.extras)
        return sums_bytes(trained, metrics) + tree_bytes(statistics)

    @property
    def _capability(self) -> float | None:
        if self.target.chip.platform != "cuda":
            return None
        described = DESCRIBED.get(self.target.chip.name)
        if described is None:
            return cuda_capability() if self.target.text == ATTACHED else None
        return float("{}.{}".format(*described["capability"]))

    def _rows(self, dp: DataParallel, rows: int) -> Any:
        count = rows * replica_count(dp.mesh)

        def shaped(leaf: Any) -> jax.ShapeDtypeStruct:
            dtype = jax.dtypes.canonicalize_dtype(leaf.dtype)
            return jax.ShapeDtypeStruct((count, *leaf.shape[1:]), dtype)

        return jax.tree.map(shaped, self._batch)


def holder(mesh: AnyMesh) -> str:
    """Return the unit that holds rows: a `device`, or a `replica` of several devices."""
    return "device" if is_data_only(mesh) else "replica"


def rows_of_a_replica(rows: int, dp: DataParallel) -> int:
    """Return the rows per replica of a global batch, padded to a multiple of its micro-batches."""
    parts = dp.split.micro_batches
    return math.ceil(rows / (replica_count(dp.mesh) * parts)) * parts


def compiled_for(
    dp: DataParallel, model: Any, batch: Any, target: Target, show: ShowProgress
) -> TargetStep:
    """Return the step of `rx.fit` with its `program` and `compilation` for a target.

    The mesh of `dp` may be of any devices, and the target's need not be attached. The batch is
    padded to a multiple of the replicas.

    Raises:
        CompilerError: there is no compiler for it here, or it fails, or the step needs more memory
            than the target has.
        ConfigError: jax requires another version of the compiler, or the mesh does not fit.
    """
    dp = in_fit(dp, model, target)
    with compiler_for(target) as (compiler, notes):
        if compiler is None:
            raise CompilerError("; ".join(notes).removeprefix("by formula: "))
        rows = rows_of_a_replica(opened(batch).count, dp)
        step = StepCache(model, batch, target, compiler, show).step(dp, rows, target.text)
    if step.compilation is None:
        raise CompilerError(
            f"{rows:,} rows per {holder(dp.mesh)} exceed the memory of {target.text}: use fewer"
        )
    return step


def in_fit(dp: DataParallel, model: Any, target: Target) -> DataParallel:
    """Return the step of `rx.fit` on the target's devices, with extra devices as replicas."""
    dp = dp.replace(mesh=abstract_like(dp.mesh, target.devices))
    return guarded(dp, dp.abstract_state(model))
