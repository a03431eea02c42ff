"""The same step with one thing changed that may take less memory."""

from collections.abc import Iterator, Mapping
from typing import Any

import jax

from replicax.analysis.hardware import Chip
from replicax.core.data_parallel import DataParallel
from replicax.core.layout import LAYOUTS
from replicax.core.modes import MODES
from replicax.core.objective import LossFunction
from replicax.core.reduction import REDUCTIONS
from replicax.errors import ReplicaxError
from replicax.plan.need import Need
from replicax.plan.program import WITHOUT_CUDNN
from replicax.plan.result import Alternative
from replicax.plan.steps import Steps
from replicax.wording import first_line

SPLITS_STATE = next(mode for mode in MODES.values() if mode.partitions)
REMAT = "remat (jax.checkpoint, products kept)"


def alternatives(
    steps: Steps,
    dp: DataParallel,
    asked: Need,
    chip: Chip,
    devices: int,
    given: Mapping[str, DataParallel] | None,
) -> tuple[tuple[Alternative, ...], tuple[str, ...]]:
    """What each change frees, and why some could not be looked at.

    Args:
        steps: for the target.
        dp: the step as it is.
        asked: what it needs.
        chip: of the target.
        devices: of the target.
        given: further changes, by name; none of them means that the loss as a whole is tried with
            `jax.checkpoint`.
    """
    found, notes = [], []
    for change, other in _changes(dp, chip, devices, given):
        try:
            found.append(_compared(steps, other, asked, change))
        except ReplicaxError as error:
            notes.append(f"{change}: {error}")
        except Exception as error:
            if change != REMAT:
                raise
            notes.append(f"{change}: the loss does not allow it ({first_line(error)})")
    if not asked.fits and not any(each.need.fits for each in found):
        change, other = _together(dp, chip, devices, given)
        if other is not dp:
            found.append(_compared(steps, other, asked, change))
    return tuple(found), tuple(notes)


def _compared(steps: Steps, other: DataParallel, asked: Need, change: str) -> Alternative:
    step = steps.step(other, asked.rows, change)
    without = step.program is not None and WITHOUT_CUDNN in step.program.notes
    note = "without cuDNN's kernels" if without else ""
    return Alternative(change, step.need, asked.bytes - step.need.bytes, note)


def _together(
    dp: DataParallel, chip: Chip, devices: int, given: Mapping[str, DataParallel] | None
) -> tuple[str, DataParallel]:
    """The most that can be changed at once; of the given changes, the last."""
    names, other = [], dp
    if given:
        name, other = list(given.items())[-1]
        names.append(name)
    if other.precision.name == "float32":
        half = half_precision(dp, chip)
        names.append(f"precision={half}")
        other = other.replace(precision=half)
    for name, split in list(_split(other, devices))[-1:]:
        names.append(name)
        other = split
    return ", ".join(names), other


def _changes(
    dp: DataParallel, chip: Chip, devices: int, given: Mapping[str, DataParallel] | None
) -> Iterator[tuple[str, DataParallel]]:
    if dp.precision.name == "float32":
        half = half_precision(dp, chip)
        yield f"precision={half}", dp.replace(precision=half)
    if given is None and dp.configuration.step is None:
        yield REMAT, dp.replace(loss=_checkpointed(dp.loss))
    yield from (given or {}).items()
    yield from _split(dp, devices)


def half_precision(dp: DataParallel, chip: Chip) -> str:
    """bfloat16, or float16 where the chip has units for that alone and the step can be scaled."""
    rates = chip.flops_per_second
    alone = "float16" in rates and "bfloat16" not in rates
    return "float16" if alone and dp.configuration.step is None else "bfloat16"


def _split(dp: DataParallel, devices: int) -> Iterator[tuple[str, DataParallel]]:
    """With more of the state split, the most last, in a mode that can hold it."""
    if devices == 1 or dp.layout.rules:
        return
    mode = dp.mode if dp.mode.partitions else SPLITS_STATE
    reduction = dp.reduction if dp.mode.partitions else REDUCTIONS["float32"]
    now = (dp.layout.splits_optimizer, dp.layout.splits_params)
    for layout in LAYOUTS.values():
        own = dp.configuration.step is not None and not layout.splits_params
        if (layout.splits_optimizer, layout.splits_params) > now and not own:
            yield f"layout={layout}", dp.replace(layout=layout, mode=mode, reduction=reduction)


def _checkpointed(loss: LossFunction) -> LossFunction:
    """A loss whose backward pass computes all again but products."""

    def checkpointed(model: Any, batch: Any, key: jax.Array | None) -> Any:
        policy = jax.checkpoint_policies.dots_saveable
        return jax.checkpoint(lambda batch, key: loss(model, batch, key), policy=policy)(batch, key)

    return checkpointed
