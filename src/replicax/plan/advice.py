"""Advice: the same step with one thing changed, the change to make first, and other batch sizes."""

import contextlib
import dataclasses
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import jax

from replicax.analysis.collectives import SLIGHTLY
from replicax.analysis.hardware import Chip
from replicax.core.data_parallel import DataParallel
from replicax.core.modes.mode_table import MODES
from replicax.core.placement.layout import LAYOUTS, Layout, LayoutName, layout
from replicax.core.placement.mesh import FSDP, MODEL, STAGE, abstract_like, replica_count
from replicax.core.placement.sharding_rules import Rules
from replicax.core.step.objective import LossFunction
from replicax.core.step.reduction import REDUCTIONS
from replicax.errors import ConfigError, ReplicaxError
from replicax.plan.calibrated import Calibrated, step_seconds
from replicax.plan.exported import WITHOUT_CUDNN
from replicax.plan.forecast import steps_to_a_loss
from replicax.plan.largest import MOST_ROWS
from replicax.plan.planned import Alternative, BatchAdvice, Need, Plan
from replicax.plan.step_traffic import read_traffic
from replicax.plan.steps import StepCache, TargetStep, rows_of_a_replica
from replicax.plan.target import Target
from replicax.text.wording import counted, first_line, size_text, time_text

REMAT_CHANGE = "remat (jax.checkpoint, products kept)"
SIZES = {MODEL: (2, 4, 8), STAGE: (2, 4)}
"""Devices per replica to try, all on one host, by the axis that its rules split it over."""
COMPILE_FLAG = "--compile-alternatives"
Wanted = bool | Sequence[str]
"""Changes to compile: all or none, or their names."""
_MICRO_BATCHES = 4
"""Per pipeline stage, which keeps the bubble below a fifth of the time."""


def alternatives(
    formula: Calibrated,
    asked: Need,
    more: Mapping[str, DataParallel] | None,
    rules: Rules = (),
    wanted: Wanted = False,
) -> tuple[tuple[Alternative, ...], tuple[str, ...]]:
    """Return the memory that each change to a step frees, and why some changes could not be tried.

    `more` holds further changes by name; if it is None, `jax.checkpoint` on the whole loss is
    tried. `rules` split layers and stages if `dp` has no rules. Changes are by formula, except
    those that are `wanted` compiled.
    """
    dp, steps = formula.dp, formula.steps
    results: list[Alternative] = []
    notes, left = [], []
    tried = dict(_changes(dp, steps, asked.rows, more, rules))
    compiled = to_compile(tried, wanted)
    for change, other in tried.items():
        try:
            other = other if isinstance(other, DataParallel) else _held(dp, **other)
            compared = _compared(formula, other, asked, change, change in compiled)
            results += [compared] if compared else []
            left += [] if compared else [change]
        except ReplicaxError as error:
            notes.append(f"{change}: {error}")
        except Exception as error:
            if change != REMAT_CHANGE:
                raise
            said = re.sub(r" \(?https?://\S+", "", first_line(error))
            notes.append(f"{change}: the loss does not allow it ({said})")
    if not asked.fits and not any(each.need.fits for each in results):
        change, most = _together(dp, steps.target, more)
        if most is not dp:
            results += filter(None, [_compared(formula, most, asked, change, bool(compiled))])
    if left:
        flag = f"{COMPILE_FLAG} {','.join(map(_short, left))}"
        notes.append(f"not compiled, and no formula tells: {'; '.join(left)}. Ask with {flag}")
    return tuple(results), tuple(notes)


def change_names(
    dp: DataParallel,
    steps: StepCache,
    rows: int,
    more: Mapping[str, DataParallel] | None,
    rules: Rules,
) -> list[str]:
    """Return the names of the changes that `alternatives` tries."""
    return [name for name, _ in _changes(dp, steps, rows, more, rules)]


def to_compile(changes: Iterable[str], wanted: Wanted) -> set[str]:
    """Return the changes to compile: all, none, or those that begin with a wanted name.

    Raises:
        ConfigError: no change has a wanted name.
    """
    if isinstance(wanted, bool):
        return set(changes if wanted else ())
    begun = {name: {each for each in changes if _begins(each, name)} for name in wanted}
    for name, found in begun.items():
        if not found:
            names = ", ".join(dict.fromkeys(map(_short, changes))) or "none"
            raise ConfigError(
                f"compile_alternatives: no change is named {name!r}; name one of those that are "
                f"tried, {names}, or leave the names out to compile all"
            )
    return set().union(*begun.values())


def _begins(change: str, name: str) -> bool:
    return re.match(rf"{re.escape(name)}(?:$|[ ,])", change) is not None


def _short(change: str) -> str:
    return re.split("[ ,]", change)[0]


def _compared(
    formula: Calibrated, other: DataParallel, asked: Need, change: str, compiled: bool
) -> Alternative | None:
    """Compare `other` with the step, for the same global batch; None if no formula can tell."""
    dp, steps = formula.dp, formula.steps
    as_is = steps.step(dp, asked.rows)
    rows = rows_of_a_replica(asked.rows * replica_count(dp.mesh), other)
    told = (steps.step(other, rows, change), False) if compiled else formula.step(other, rows)
    if told is None:
        return None
    (step, unclear), note = told, ""
    seconds = step_seconds(steps, step)
    if _lacks_cudnn(step) and not _lacks_cudnn(as_is):
        as_is = steps.step(dp, asked.rows, "without cuDNN", without_cudnn=True)
        bare = step_seconds(steps, as_is)
        took = "" if bare is None else f" and {time_text(bare)}"
        note = f"no cuDNN kernels; baseline without: {size_text(as_is.need.bytes)}{took}"
    elif seconds is not None and not step.need.compiled:
        # The formula counts products alone: what the compiled step takes beyond them, both do.
        seconds *= formula.slower
    return Alternative(
        change,
        step.need,
        as_is.need.bytes - step.need.bytes,
        note,
        seconds,
        read_traffic(step.schedule, other.mesh.size, 0).wire_bytes if step.schedule else None,
        unclear,
    )


def _lacks_cudnn(step: TargetStep) -> bool:
    return step.program is not None and WITHOUT_CUDNN in step.program.notes


def _together(
    dp: DataParallel, target: Target, more: Mapping[str, DataParallel] | None
) -> tuple[str, DataParallel]:
    """Combine all changes that work together; from `more`, take the last."""
    names, other = [], dp
    if more:
        name, other = list(more.items())[-1]
        names.append(name)
    for name, changes in (*_half(other, target.chip), *[*_layouts(other)][-1:]):
        names.append(name)
        other = _held(other, **changes)
    return ", ".join(names), other


def _changes(
    dp: DataParallel,
    steps: StepCache,
    rows: int,
    more: Mapping[str, DataParallel] | None,
    rules: Rules,
) -> Iterator[tuple[str, DataParallel | dict[str, Any]]]:
    """Yield changes by name: another step, or the arguments to replace in this one."""
    target = steps.target
    yield from _half(dp, target.chip)
    if more is None and dp.configuration.step is None:
        yield REMAT_CHANGE, {"loss": _checkpointed(dp.loss)}
    yield from (more or {}).items()
    yield from _layouts(dp)
    each = target.devices_per_host * replica_count(dp.mesh) // dp.mesh.size
    if target.topology is None and target.hosts > 1 and each > 1 and FSDP not in dp.mesh.shape:
        # Hybrid sharding: the state split within each host and replicated across hosts.
        split = _over_replicas(dp, list(LAYOUTS.values())[-1])
        mesh = abstract_like(dp.mesh, dp.mesh.size, fsdp=each)
        yield f"layout={split}, fsdp={each}", {"layout": split, "mesh": mesh}
    # Only a compiler can tell which activations of split layers a device stores.
    axes = (STAGE,) if steps.compiler is None else (MODEL, STAGE)
    yield from _shared(dp, target, rows, rules, axes)


def _half(dp: DataParallel, chip: Chip) -> Iterator[tuple[str, dict[str, Any]]]:
    """bfloat16, or float16 if the chip supports only that and the loss can be scaled."""
    if dp.precision.name == "float32":
        rates = chip.flops_per_second
        alone = "float16" in rates and "bfloat16" not in rates
        half = "float16" if alone and dp.configuration.step is None else "bfloat16"
        yield f"precision={half}", {"precision": half}


def _layouts(dp: DataParallel) -> Iterator[tuple[str, dict[str, Any]]]:
    """Layouts that shard more of the state over the replicas, ending with the most sharded."""
    now = (dp.layout.splits_optimizer, dp.layout.splits_params)
    for base in LAYOUTS.values() if replica_count(dp.mesh) > 1 else ():
        own = dp.configuration.step is not None and not base.splits_params
        if (base.splits_optimizer, base.splits_params) > now and not own:
            split = _over_replicas(dp, base)
            yield f"layout={split}", {"layout": split}


def _over_replicas(dp: DataParallel, base: Layout) -> Layout:
    name = cast(LayoutName, base.name)  # in LAYOUTS
    return layout(name, rules=dp.layout.rules, schedule=dp.layout.schedule)


def _shared(
    dp: DataParallel, target: Target, rows: int, rules: Rules, axes: Iterable[str]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Several neighbouring devices per replica, as the rules allow."""
    own = dataclasses.replace(dp.layout, rules=tuple(dp.layout.rules or rules))
    near = target.devices_per_host if target.topology is None else target.devices
    now = dp.mesh.size // replica_count(dp.mesh)
    tried = [(axis, size) for axis in axes if axis in own.axes for size in SIZES[axis]]
    for axis, size in tried:
        if dp.mesh.shape.get(axis, 1) > 1 or now * size > near or dp.mesh.size % (now * size):
            continue
        mesh = abstract_like(dp.mesh, dp.mesh.size, **{axis: size})
        changes, name = {"layout": own, "mesh": mesh}, f"{axis}={size}"
        if axis == STAGE:
            each = max(1, rows * replica_count(dp.mesh) // replica_count(mesh))
            parts = max(dp.accumulate, min(_MICRO_BATCHES * size, each))
            changes, name = {**changes, "accumulate": parts}, f"{name}, accumulate={parts}"
        yield name, changes


def _held(dp: DataParallel, **changes: Any) -> DataParallel:
    """Return `dp` with these changes, in its own mode or else in the first that supports them."""
    for mode in (dp.mode, *MODES.values()):
        for reduction in (dp.reduction, REDUCTIONS["float32"]):
            with contextlib.suppress(ConfigError):
                return dp.replace(**changes, mode=mode, reduction=reduction)
    return dp.replace(**changes)  # raises the reason


def _checkpointed(loss: LossFunction) -> LossFunction:
    """Return a loss whose backward pass recomputes everything except matrix products."""

    def checkpointed(model: Any, batch: Any, key: jax.Array | None) -> Any:
        policy = jax.checkpoint_policies.dots_saveable
        return jax.checkpoint(lambda batch, key: loss(model, batch, key), policy=policy)(batch, key)

    return checkpointed


_WORTH = 1.1
"""Smallest speedup worth reporting."""
_FEWEST_STEPS = 10
"""Smallest number of steps in an epoch for which a larger batch is suggested."""
_WAITING = 0.1
"""Share of a step spent waiting for the network above which it is reported."""


def first_change(dp: DataParallel, plan: Plan) -> str:
    """Describe in one sentence the change that improves a step most."""
    if not plan.asked.fits:
        return _to_fit(plan)
    if not plan.speeds:
        return "nothing to suggest: it fits, and the target's speed is unknown"
    now, traffic = plan.speeds[0].step, plan.traffic
    waiting = now.exposed_seconds / now.seconds
    if (fewer := plan.fewer_devices) is not None:
        larger = ", or a larger batch" * (plan.speeds[-1].rows > plan.speeds[0].rows)
        return (
            f"use {counted(fewer, 'device')}{larger}: the step is too small for "
            f"{plan.target.devices:,}, which wait {waiting:.0%} of it for the network"
        )
    times, text = max(_faster(plan), default=(0.0, ""))
    if times > _WORTH:
        return text
    other = not dp.mode.per_replica and dp.layout.is_whole  # a layout that shard_map supports
    if other and traffic is not None and traffic.share > SLIGHTLY and waiting > _WAITING:
        return (
            f"mode=shard_map: it sends {1 / traffic.share:.0%} of the bytes this mode sends, and "
            f"{waiting:.0%} of a step waits for the network"
        )
    if waiting > _WAITING:
        return f"fewer devices or faster links: {waiting:.0%} of a step waits for the network"
    return "nothing: the step is as large and as fast as this target allows"


def _faster(plan: Plan) -> Iterator[tuple[float, str]]:
    """Yield changes that may be faster: the ratio of rows per second, and a sentence."""
    now, most = plan.speeds[0], plan.speeds[-1]
    epoch = plan.about.get("data_rows") or math.inf
    enough = _FEWEST_STEPS * most.rows * plan.replicas <= epoch
    if enough and now.rows < most.rows < MOST_ROWS // 2:  # larger batches are unrealistic
        times = most.rows_per_second / now.rows_per_second
        yield (
            times,
            f"a batch of {most.rows * plan.replicas:,} rows, {most.rows:,} per "
            f"{plan.holder}: up to {times:.1f} times the rows per second",
        )
    for each in plan.alternatives:
        if each.need.fits and not each.unclear and each.step_seconds is not None:
            times = now.step.seconds / each.step_seconds
            how = ", by formula" if plan.asked.compiled and not each.need.compiled else ""
            frees = f", {size_text(each.freed_bytes)} less per device" * (each.freed_bytes > 0)
            yield times, f"{each.change}: up to {times:.1f} times as fast{frees}{how}"


def _to_fit(plan: Plan) -> str:
    each, parts = plan.holder, plan.micro_batches
    if parts is not None:
        return (
            f"accumulate={parts.accumulate}: the same batch in micro-batches of "
            f"{parts.need.rows // parts.accumulate:,} rows per {each} fits"
        )
    fitting = [other for other in plan.alternatives if other.need.fits and not other.unclear]
    if fitting:
        least = min(fitting, key=lambda other: other.need.bytes)
        return f"{least.change}: it then fits, with {size_text(least.need.bytes)} per device"
    if plan.largest is not None:
        rows = plan.largest.rows
        return f"a batch of {rows * plan.replicas:,} rows, {rows:,} per {each}, fits"
    if any(other.unclear for other in plan.alternatives):
        near = next(other.change for other in plan.alternatives if other.unclear)
        return f"{near}: it may fit or not; ask with {COMPILE_FLAG} {_short(near)}"
    return "more memory per device or a smaller model: none of the changes below makes it fit"


def batch_advice(
    asked_rows: int, planned: Sequence[int], noise_scale: float | None
) -> tuple[BatchAdvice, ...]:
    """Compare each planned global batch size with the requested one."""
    return tuple(
        BatchAdvice(
            rows,
            linear=rows / asked_rows,
            square_root=math.sqrt(rows / asked_rows),
            steps=steps_to_a_loss(rows, noise_scale) if noise_scale else None,
            examples=1 + rows / noise_scale if noise_scale else None,
        )
        for rows in dict.fromkeys(planned)
    )
