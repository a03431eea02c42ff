"""Steps of any size for one target, compiled where that can be, and by formula where it cannot."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax

from replicax.analysis.traced_for import cuda_capability, traced_for
from replicax.core.data_parallel import DataParallel
from replicax.core.mesh import abstract_mesh
from replicax.plan.compilation import Compilation, TooLarge
from replicax.plan.compiler import Compiler
from replicax.plan.gpu_description import DESCRIPTIONS
from replicax.plan.memory import MemoryFormula, memory_formula
from replicax.plan.need import Need
from replicax.plan.program import Program, export_step, step_flops
from replicax.plan.target import ATTACHED, Target

Show = Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class Step:
    """A step for a target, and what came of it."""

    need: Need
    formula: MemoryFormula
    program: Program | None = None
    """None without a compiler."""
    compilation: Compilation | None = None
    """None without a compiler, or where the compiler refuses the step."""


class Steps:
    """Steps of any size for one target, each made once.

    Args:
        model: as for `DataParallel.lower`; arrays or their shapes.
        batch: the pytree `[rows, ...]` of which others of any number of rows are made.
        target: the devices.
        compiler: for it; None to go by formula.
        show: told what is next, a line at a time.
    """

    def __init__(
        self, model: Any, batch: Any, target: Target, compiler: Compiler | None, show: Show
    ) -> None:
        self._model, self._batch = model, batch
        self._target, self._compiler, self._show = target, compiler, show
        self._made: dict[tuple[int, int], tuple[DataParallel, Step]] = {}
        self._formulas: dict[tuple[int, int], tuple[DataParallel, MemoryFormula]] = {}

    @property
    def capacity_bytes(self) -> int | None:
        """What a step may take of one device; None where nobody tells."""
        return self._target.chip.usable_bytes

    @property
    def compiler(self) -> str | None:
        """The compiler's name and version; None by formula."""
        return None if self._compiler is None else self._compiler.name

    def unit(self, dp: DataParallel) -> int:
        """Rows of a device are a multiple of it: its micro-batches."""
        return dp.configuration.split(abstract_mesh(self._target.devices)).micro_batches

    def formula(self, dp: DataParallel, rows: int) -> MemoryFormula:
        """By formula, for as many rows of a device."""
        key = (id(dp), rows)
        if key not in self._formulas:
            batch, devices = self._rows(rows), self._target.devices
            platform = self._target.chip.platform
            # Without its compiler, a kernel that only a described GPU has cannot be traced either.
            with traced_for(self._capability if self._compiler else None):
                found = memory_formula(dp, self._model, batch, devices, platform=platform)
            self._formulas[key] = dp, found
        return self._formulas[key][1]

    def step(self, dp: DataParallel, rows: int, what: str = "") -> Step:
        """A step of as many rows a device.

        Raises:
            CompilerError: see `Compiler.compile`.
            ConfigError: see `export_step`.
        """
        key = (id(dp), rows)
        if key not in self._made:
            self._show(f"{what}{', ' if what else ''}{rows:,} rows a device")
            self._made[key] = dp, self._make(dp, rows)
        return self._made[key][1]

    def _make(self, dp: DataParallel, rows: int) -> Step:
        formula = self.formula(dp, rows)
        if self._compiler is None:
            needed = formula.total
            return Step(Need(rows, needed, self._holds(needed), False), formula)
        program = export_step(
            dp,
            self._model,
            self._rows(rows),
            self._target.devices,
            self._target.chip.platform,
            self._capability,
        )
        answer = self._compiler.compile(program)
        if isinstance(answer, TooLarge):
            # A compiler may stop at the first sum that is too much.
            least = max(answer.needed_bytes or 0, answer.available_bytes or 0, formula.total)
            return Step(Need(rows, least, False, True), formula, program)
        peak, memory = answer.memory.peak, answer.memory
        need = Need(rows, peak, self._holds(peak), True, max(0, peak - memory.arguments))
        return Step(need, formula, program, answer)

    def needs(self, dp: DataParallel) -> tuple[Need, ...]:
        """Of all steps of `dp` that were made, by rows."""
        made = [step.need for owner, step in self._made.values() if owner is dp]
        return tuple(sorted(made, key=lambda need: need.rows))

    def flops(self, dp: DataParallel, rows: int) -> float:
        """Of matrix products and convolutions on one device, for as many rows of it."""
        devices, platform = self._target.devices, self._target.chip.platform
        return step_flops(dp, self._model, self._rows(rows), devices, platform) / devices

    def _holds(self, size: int) -> bool:
        return self.capacity_bytes is None or size <= self.capacity_bytes

    @property
    def _capability(self) -> float | None:
        if self._target.chip.platform != "cuda":
            return None
        described = DESCRIPTIONS.get(self._target.chip.name)
        if described is None:
            return cuda_capability() if self._target.text == ATTACHED else None
        return float("{}.{}".format(*described.capability))

    def _rows(self, rows: int) -> Any:
        count = rows * self._target.devices

        def shaped(leaf: Any) -> jax.ShapeDtypeStruct:
            dtype = jax.dtypes.canonicalize_dtype(leaf.dtype)
            return jax.ShapeDtypeStruct((count, *leaf.shape[1:]), dtype)

        return jax.tree.map(shaped, self._batch)


def rows_of_a_device(rows: int, devices: int, unit: int) -> int:
    """Rows of each device for a global batch, filled up to a multiple of `unit`.

    Args:
        rows: of the global batch.
        devices: that share it.
        unit: micro-batches of a device.
    """
    return math.ceil(rows / (devices * unit)) * unit
