"""Options of a recipe's step, shared by all commands, its devices, and its data."""

import contextlib
import dataclasses
import os
from typing import Annotated, Any, Literal

import jax

import replicax as rx
from replicax.cli.flags import one_of, shown_as
from replicax.cluster.place import find_place
from replicax.core.between.rounds import OuterSGD
from replicax.core.data.given import leading_rows
from replicax.core.data.rows import opened
from replicax.core.ground.codecs import CODECS, CodecName, ReductionName
from replicax.core.ground.job import Job
from replicax.core.ground.precision import PrecisionName
from replicax.core.modes.exact.exact_mode import MICRO_SHARDS
from replicax.core.modes.exact.fixed_tree import fix_threads
from replicax.core.modes.mode_table import MODES, ModeName, as_mode
from replicax.core.placement.layout import LAYOUTS, Layout, LayoutName
from replicax.core.placement.mesh import replica_count
from replicax.core.placement.pipeline_schedules import SCHEDULES, ScheduleName
from replicax.core.step.reduction import REDUCTIONS
from replicax.errors import ConfigError
from replicax.recipes.recipe import recipe_name
from replicax.text.arguments import Count, Devices, Natural, NotNegative
from replicax.text.table import labelled

# Each docstring is one line: tyro would keep its line breaks in --help.


@dataclasses.dataclass(frozen=True)
class StepOptions:
    """How the step of a recipe is computed, in any mode, and its mesh."""

    layout: Annotated[LayoutName, one_of(LAYOUTS)] = "replicated"
    """How the parameters and the optimizer state are sharded."""
    model_parallel: Count = 1
    """Adjacent devices that split each layer of a replica, by the recipe's rules."""
    stages: Count = 1
    """Pipeline stages that the layers are split into; --accumulate micro-batches pass through."""
    fsdp_size: Annotated[int | None, shown_as("INT", "all")] = None
    """Layouts zero1 and fsdp: adjacent replicas that shard one copy of the state."""
    schedule: Annotated[ScheduleName, one_of(SCHEDULES)] = "1f1b"
    """Order of the micro-batches through the stages; gpipe keeps all of them in memory."""
    accumulate: Annotated[Count | None, shown_as("INT", "1; train: as few as fit")] = None
    """Micro-batches per device, computed one after another."""
    micro_shards: Count = MICRO_SHARDS
    """Mode exact, and islands: parts of every global batch on any device count; a power of two."""
    precision: PrecisionName = "float32"
    """Dtype the model computes in; parameters and optimizer state stay in float32."""
    reduction: Annotated[ReductionName, one_of(REDUCTIONS)] = "float32"
    """Dtype gradients are sent in; others than float32 in per-replica modes only."""

    @property
    def _axes(self) -> str:
        """The given flags that define mesh axes."""
        sizes = (self.model_parallel, self.stages, self.fsdp_size or 1)
        flags = zip(("--model-parallel", "--stages", "--fsdp-size"), sizes, strict=True)
        return " ".join(f"{flag} {size}" for flag, size in flags if size > 1)

    @property
    def least_devices(self) -> int:
        """Number of devices of the smallest mesh: one copy of the state."""
        copy = self.fsdp_size
        if copy is not None and (copy < 2 or not LAYOUTS[self.layout].splits_optimizer):
            raise ConfigError(
                f"--fsdp-size {copy} with --layout {self.layout}; zero1 and fsdp shard a copy over "
                "at least 2 replicas: use one of them, or leave the flag out"
            )
        return self.model_parallel * self.stages * (copy or 1)

    def mesh(self, devices: int | None) -> jax.sharding.Mesh | None:
        """Return the mesh of `devices`, by default of all; None if the mode may choose them."""
        least = self.least_devices
        if devices is None and least == 1:
            return None
        count = jax.device_count() if devices is None else devices
        if count % least:
            raise ConfigError(
                f"{count} devices with {self._axes}; their product {least} must divide the "
                "devices: change --devices or the others"
            )
        return rx.make_mesh(
            count // least, self.model_parallel, self.stages, fsdp=self.fsdp_size or 1
        )

    def layout_of(self, recipe: Any) -> Layout:
        """Return the layout, with the rules of `recipe` if the mesh has axes for them."""
        if self.model_parallel * self.stages == 1:
            return rx.layout(self.layout, schedule=self.schedule)
        if not hasattr(recipe, "rules"):
            raise ConfigError(
                f"{self._axes} with recipe {recipe_name(type(recipe))}, which has no sharding "
                "rules: give it a method rules(), or leave the flag out"
            )
        heads = getattr(recipe, "heads", None)
        if heads is not None and heads % self.model_parallel:
            raise ConfigError(
                f"--model-parallel {self.model_parallel} with heads={heads}; it must divide the "
                "heads: change one of the two"
            )
        return rx.layout(self.layout, rules=recipe.rules(), schedule=self.schedule)

    def settings(self, recipe: Any) -> dict[str, Any]:
        """Return these options as arguments of `DataParallel`, except the mesh."""
        return {
            "layout": self.layout_of(recipe),
            "accumulate": 1 if self.accumulate is None else self.accumulate,
            "micro_shards": self.micro_shards,
            "precision": self.precision,
            "reduction": self.reduction,
        }

    def data_parallel(
        self,
        recipe: Any,
        mode: str,
        mesh: jax.sharding.Mesh | None,
        job: Job | None = None,
        **more: Any,
    ) -> rx.DataParallel:
        """Return the step of `recipe` on `mesh`, by default on all devices that `mode` supports.

        `more` are further arguments of `DataParallel`.
        """
        arguments = {"mesh": mesh, "mode": mode, "job": job, **self.settings(recipe), **more}
        return rx.DataParallel(recipe.loss, recipe.optimizer(), **arguments)

    def fix_threads(self, *modes: str) -> None:
        """Fix XLA's thread count before JAX starts, if a mode's bits depend on it."""
        if any(as_mode(mode).bitwise for mode in modes):
            fix_threads(self.micro_shards)


@dataclasses.dataclass(frozen=True)
class ModeOptions:
    """The mode, for commands that run a step in a single one."""

    mode: Annotated[ModeName, one_of(MODES)] = "jit"
    """How the step is parallelized; exact gives the same bits on any number of devices."""


@dataclasses.dataclass(frozen=True)
class DeviceOptions:
    """The devices, for commands that run a step on a single number of them."""

    devices: Annotated[Devices | None, shown_as("INT", "all")] = None
    """Number of devices, over all processes; simulated on a CPU (verify: 8 by default)."""


@dataclasses.dataclass(frozen=True)
class RoundOptions:
    """Rounds of steps between two exchanges, for commands that run a step in a single mode."""

    every: Annotated[Count | None, shown_as("N", "none: islands add up every step")] = None
    """Steps of a round, after which islands exchange how their parameters changed (DiLoCo)."""
    send: Annotated[CodecName, one_of(CODECS)] = "float32"
    """With --every: how islands encode what they send, with error feedback."""
    outer_rate: Annotated[NotNegative | None, shown_as("FLOAT", "0.5 to 0.8; sparse: 1")] = None
    """With --every: learning rate of the outer step, SGD on what all islands sent."""
    outer_momentum: Annotated[NotNegative | None, shown_as("FLOAT", "0.9; sparse: 0")] = None
    """With --every: Nesterov momentum of the outer step. In less than 100 rounds 0.5 is better."""
    fragments: Count = 1
    """With --every: parts of the parameters, sent in turn at equal intervals of a round."""
    delay: Natural = 0
    """With --every: steps after which an outer step takes effect, sent in the background."""
    island_axis: Annotated[Literal["data"] | None, shown_as("data", "the job's islands")] = None
    """With --every and --mode shard_map: data makes each replica an island, to simulate them."""

    def rounds(self, mesh: jax.sharding.Mesh | None, job: Job) -> dict[str, Any]:
        """Return the argument `rounds` of `DataParallel`, if there are rounds."""
        if self.every is None:
            fields = dataclasses.fields(RoundOptions)
            given = [each.name for each in fields if getattr(self, each.name) != each.default]
            if given:
                raise ConfigError(
                    f"--{given[0].replace('_', '-')} without --every; it is about rounds of steps: "
                    "add --every 30, or leave it out"
                )
            return {}
        rounds = rx.Rounds(
            every=self.every,
            send=self.send,
            fragments=self.fragments,
            delay=self.delay,
            axis=self.island_axis,
        )
        rate, momentum = self.outer_rate, self.outer_momentum
        count = 1 if job.peers is None else job.peers.count
        if self.island_axis is not None:
            count = jax.device_count() if mesh is None else replica_count(mesh)
        if (rate, momentum) != (None, None):
            outer = OuterSGD(count, rounds.codec, rate, momentum)
            rounds = dataclasses.replace(rounds, outer=outer)
        return {"rounds": rounds}


def make_host_devices(devices: int, processes: int = 1) -> None:
    """Create this process's share of `--devices` as simulated CPU devices, before JAX starts."""
    if devices < 1:
        raise ConfigError(f"--devices {devices}; a step needs at least 1: raise it")
    if devices % processes:
        raise ConfigError(
            f"--devices {devices} on {processes} processes leaves a remainder; each must have "
            f"the same number: use a multiple of {processes}"
        )
    with contextlib.suppress(RuntimeError):  # the backend is initialized: keep its devices
        jax.config.update("jax_num_cpu_devices", devices // processes)


def check_alone(command: str, why: str) -> None:
    """Raise `ConfigError` in a job of several processes."""
    place = find_place(os.environ)
    if place.processes > 1:
        raise ConfigError(
            f"{command} as process {place.process} of {place.processes} ({place.engine}); {why}"
        )


def data_lines(recipe: Any) -> list[str]:
    """Return the recipe's description of its data, if any, as lines."""
    if not hasattr(recipe, "data_description"):
        return []
    return labelled("data", recipe.data_description())


def first_rows(source: Any, rows: int) -> Any:
    """Return the first rows of a source, or of its first batches, as host arrays."""
    first = leading_rows(source, rows)
    if (count := opened(first).count) < rows:
        raise ConfigError(
            f"the source has {count} rows but {rows} are needed: give it more, or use fewer "
            "--devices"
        )
    return first
