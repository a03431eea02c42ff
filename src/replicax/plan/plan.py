"""`plan`: does a step fit hardware that need not be there, how large a batch, and how fast?"""

import contextlib
import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any

import jax

from replicax.analysis.host import measured
from replicax.core.data_parallel import DataParallel
from replicax.core.mesh import abstract_like
from replicax.core.partition import Rules
from replicax.errors import ConfigError, MissingDependencyError
from replicax.plan.compilation import Description
from replicax.plan.compiler import AttachedCompiler, Compiler
from replicax.plan.compiler_pool import CompilerPool
from replicax.plan.gpu_description import DESCRIPTIONS
from replicax.plan.memory import rows_that_fit, tree_bytes
from replicax.plan.planner import Planner
from replicax.plan.result import OnPaper, Plan
from replicax.plan.steps import Show, Steps
from replicax.plan.target import ATTACHED, Target, parse_target
from replicax.plan.transformer_formula import Transformer, transformer_activation_bytes
from replicax.train.guarded import guarded


def plan(
    dp: DataParallel,
    model: Any,
    batch: Any,
    *,
    target: str | Target,
    changes: Mapping[str, DataParallel] | None = None,
    rules: Rules = (),
    tokens_per_row: int | None = None,
    wished_rows: float | None = None,
    noise_scale: float | None = None,
    transformer: Transformer | None = None,
    by_formula: bool = False,
    show: Show | None = None,
) -> Plan:
    """Whether a step fits a target, the largest batch that does, and how fast it can be.

    The step is that of `rx.fit`, which skips bad updates. It is exported here and compiled by the
    target's own compiler in a process of its own; nothing runs, and no device of the target need be
    there. Where its compiler is not installed, or there is none, the plan is by formula, and
    `Plan.notes` says what to install.

    Args:
        dp: the step; its own mesh may be of any devices. On those of the target the other axes keep
            their sizes, and `data` has what they leave.
        model: as for `dp.init`; arrays or their shapes.
        batch: a pytree of arrays `[rows, ...]`, or of their shapes: the global batch.
        target: `h100:8`, `v5e:16x16`, `cpu:8`, `attached`; see `replicax.plan.target`.
        changes: steps to compare with, by what is changed; they take the same model and batch.
            Precision and layout are always among them, and `jax.checkpoint` on the whole loss where
            none is given.
        rules: as for `rx.layout`: where `dp` has none, layers and stages are tried by them.
        tokens_per_row: where tokens are counted.
        wished_rows: to train on in all: the plan tells the device-hours.
        noise_scale: the gradient noise scale in rows, where a run measured it.
        transformer: the sizes of one, to put the formula that is used on paper beside the rest.
        by_formula: leave the compiler out.
        show: told what is next, a line at a time.

    Raises:
        ConfigError: an unknown target, or one that its chip does not come in; a compiler of another
            version than jax wants; axes of the mesh that do not divide the devices; several
            processes; rows or a noise scale that are not above 0.
        CompilerError: the compiler fails.
    """
    if jax.process_count() > 1:
        raise ConfigError(
            f"plan on {jax.process_count()} processes; one can plan for any number: start it alone"
        )
    for name, value in (("wished_rows", wished_rows), ("noise_scale", noise_scale)):
        if value is not None and not 0 < value < math.inf:
            raise ConfigError(f"{name}={value}; it is a number of rows above 0: give one")
    show = show or (lambda text: None)
    aim = parse_target(target) if isinstance(target, str) else target
    dp = in_fit(dp, model, aim)
    if changes is not None:
        changes = {name: in_fit(other, model, aim) for name, other in changes.items()}
    if aim.chip.platform == "cpu":
        aim = dataclasses.replace(aim, chip=measured(aim.chip, aim.devices))
    with compiler_for(aim, by_formula) as (compiler, notes):
        steps = Steps(model, batch, aim, compiler, show)
        planner = Planner(dp, model, batch, aim, steps, changes, rules, tokens_per_row)
        found = planner.plan(wished_rows, noise_scale, notes)
    held = tree_bytes(dp.abstract_state(model).params)
    return dataclasses.replace(found, on_paper=_on_paper(aim, held, transformer))


@contextlib.contextmanager
def compiler_for(
    target: Target, by_formula: bool = False
) -> Iterator[tuple[Compiler | None, tuple[str, ...]]]:
    """The compiler for a target, or None and why there is none.

    Raises:
        ConfigError: jax wants another version of it.
        CompilerError: it cannot describe the target.
    """
    if by_formula:
        yield None, ("by formula, as it was asked for",)
        return
    if target.text == ATTACHED and target.chip.platform != "cpu":
        yield AttachedCompiler(jax.devices()), ()
        return
    described = _description(target)
    if described is None:
        yield None, (f"by formula: no compiler describes an {target.chip.title}",)
        return
    with contextlib.ExitStack() as stack:
        compiler: Compiler | None = None
        notes: tuple[str, ...] = ()
        try:
            compiler = stack.enter_context(CompilerPool(described))
        except MissingDependencyError as missing:
            notes = (f"by formula: {missing}",)
        yield compiler, notes


def in_fit(dp: DataParallel, model: Any, target: Target) -> DataParallel:
    """The step of `rx.fit` on the target's devices: further ones are further replicas."""
    dp = dp.replace(mesh=abstract_like(dp.mesh, target.devices))
    return guarded(dp, dp.abstract_state(model))


def _on_paper(
    target: Target, parameter_bytes: int, transformer: Transformer | None
) -> OnPaper | None:
    capacity = target.chip.usable_bytes
    if transformer is None or capacity is None:
        return None
    each = transformer_activation_bytes(parameter_bytes, 1, **dataclasses.asdict(transformer))
    return OnPaper(each, rows_that_fit(capacity, parameter_bytes, each))


def _description(target: Target) -> Description | None:
    """For a compiler; None where there is none for the chip."""
    chip = target.chip
    if chip.platform == "cpu":
        return Description("cpu", target.devices, {})
    if chip.platform == "cuda" and chip.name not in DESCRIPTIONS:
        return None
    arguments = dict(target.topology_arguments)
    platform = arguments.pop("platform")
    if platform == "cuda":
        assert chip.memory_bytes is not None  # it is in the table of those that are described
        arguments["target_config"] = DESCRIPTIONS[chip.name].text(chip.memory_bytes)
    return Description(platform, target.devices, arguments)
