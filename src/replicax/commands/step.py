"""The options of a step, declared once for every command."""

import dataclasses
from typing import Annotated, Any, Literal

import jax

import replicax as rx
from replicax.core.exact import MICRO_SHARDS, fix_threads
from replicax.core.job import Job
from replicax.core.layout import LAYOUTS
from replicax.core.modes import MODES, as_mode
from replicax.core.reduction import REDUCTIONS
from replicax.flags import one_of, shown_as

# A docstring of one line each: tyro would keep its line breaks in --help.


@dataclasses.dataclass(frozen=True)
class StepOptions:
    """How the step of a recipe is computed, in whichever mode.

    Each field is an argument of `DataParallel`.
    """

    layout: Annotated[str, one_of(LAYOUTS)] = "replicated"
    """Where the parameters and the optimizer state live."""
    accumulate: int = 1
    """Micro-batches per device, computed one after another."""
    micro_shards: int = MICRO_SHARDS
    """Mode exact: parts of every global batch, on any number of devices; a power of two."""
    precision: Literal["float32", "bfloat16", "float16"] = "float32"
    """Dtype the model computes in; parameters and optimizer state stay in float32."""
    reduction: Annotated[str, one_of(REDUCTIONS)] = "float32"
    """Dtype gradients are rounded to on the wire; bfloat16 in per-replica modes only."""

    def settings(self) -> dict[str, Any]:
        """Return these options as arguments of `DataParallel`."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(StepOptions)}

    def data_parallel(
        self, recipe: Any, mode: str, mesh: jax.sharding.Mesh | None, job: Job | None = None
    ) -> rx.DataParallel:
        """Return the step of `recipe` on `mesh`, by default on all devices that `mode` can take."""
        loss, optimizer = recipe.loss, recipe.optimizer()
        return rx.DataParallel(loss, optimizer, mesh=mesh, mode=mode, job=job, **self.settings())

    def fix_threads(self, *modes: str) -> None:
        """Fix the number of XLA's threads if the bits of a mode depend on it, before JAX starts.

        Raises:
            ConfigError: no such mode.
        """
        if any(as_mode(mode).bitwise for mode in modes):
            fix_threads(self.micro_shards)


@dataclasses.dataclass(frozen=True)
class ModeOptions:
    """The mode, in the commands that run a step in one."""

    mode: Annotated[str, one_of(MODES)] = "jit"
    """How the step is parallelized; exact gives the same bits on any number of devices."""


@dataclasses.dataclass(frozen=True)
class DeviceOptions:
    """The devices, in the commands that run a step on one number of them."""

    devices: Annotated[int | None, shown_as("INT", "all")] = None
    """Number of devices, over all processes; simulated on a CPU (verify: 8 by default)."""
