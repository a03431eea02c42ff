"""Find sums that a step computes in 16-bit floats, which silently lose precision."""

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from replicax.analysis.collectives import axes_of_group
from replicax.analysis.low_precision_sums import (
    BETWEEN_DEVICES,
    MANY,
    REDUCE,
    SCATTER,
    Sum,
    has_16_bits,
    sums_in_16_bits,
)
from replicax.core.data_parallel import DataParallel
from replicax.core.modes.mode_table import MODES
from replicax.core.placement.mesh import DATA, FSDP
from replicax.errors import ReplicaxError
from replicax.text.checks import NOTE, PASS, SKIP, Check
from replicax.text.wording import first_line
from replicax.train.guarded import guarded
from replicax.verify.causes import NO_CAUSE

_BETWEEN = BETWEEN_DEVICES[0]
_SHOWN = 3
"""The most sums of one kind that are listed; the rest are counted."""


@dataclasses.dataclass(frozen=True)
class Text:
    """The text of a step's program for some devices."""

    text: str
    sizes: Mapping[str, int]
    """Devices by mesh axis."""
    notes: tuple[str, ...] = ()
    """How it differs from the requested step."""


@dataclasses.dataclass(frozen=True)
class Elsewhere:
    """Devices that need not be attached, with a compiler for them."""

    name: str
    """`h100:8`."""
    compile: Callable[[DataParallel, Any, Any], Text]
    """Takes the step, its model and the shapes of a batch; may raise a `ReplicaxError`."""


def check_sums(
    dp: DataParallel,
    model: Any,
    batch: Any,
    elsewhere: Elsewhere | None,
    without: Callable[[], bool] = lambda: False,
) -> Iterator[Check]:
    """Yield a row for each kind of sum in 16 bits, or one row if there are none.

    The compiled program is read for attached accelerators and for `elsewhere`. On a CPU the traced
    program is read, because the CPU compiler widens some of these sums. A step that is known to be
    `without` such floats is not traced for the attached devices.
    """
    if elsewhere is None and without():
        return
    where = elsewhere or Elsewhere("", _here)
    case = ", ".join(filter(None, (str(dp.mode), where.name)))
    try:
        read = where.compile(dp, model, batch)
    except Exception as error:  # the user's loss may raise anything
        if elsewhere is not None:  # other checks report failures on the attached devices
            refused = isinstance(error, ReplicaxError)
            yield Check("sums", case, SKIP, str(error) if refused else first_line(error))
        return
    if elsewhere is not None or has_16_bits(read.text):
        yield from judged_sums(case, read, dp)


def judged_sums(case: str, read: Text, dp: DataParallel) -> Iterator[Check]:
    """Yield the rows for the program of `dp` on some devices."""
    found = [each for each in sums_in_16_bits(read.text) if _between_replicas(each, read.sizes)]
    notes = "".join(f"; {note}" for note in read.notes)
    if not found:
        text = f"none in 16 bits, of {MANY} or more terms or between devices{notes}"
        yield Check("sums", case, PASS, text)
    for kind in (SCATTER, REDUCE, _BETWEEN):
        several = [each for each in found if _kind(each) == kind]
        if several:
            what = _WHAT[kind].format(several[0].dtype)
            text = f"{what}: {_listed(several)}; {_fix(kind, dp)}{notes}"
            figures = {"sums": [dataclasses.asdict(each) for each in several]}
            yield Check("sums", case, NOTE, text, "", figures)


def with_sums_as_cause(check: Check, sums: Callable[[], Sequence[Check]]) -> Check:
    """Return a check, naming `sums` as the likely cause if its difference is unexplained."""
    if NO_CAUSE not in check.cause or all(each.verdict != NOTE for each in sums()):
        return check
    likely = "likely the 16-bit sums below, which round differently when devices add partial sums"
    cause = check.cause.replace(NO_CAUSE, f"{likely}; no other fits")
    return dataclasses.replace(check, cause=cause)


def _here(dp: DataParallel, model: Any, batch: Any) -> Text:
    """Return the program of the attached devices: compiled, or as traced on a CPU."""
    dp = guarded(dp, dp.abstract_state(model))
    lowered = dp.lower(model, batch)
    if dp.mesh.devices.flat[0].platform == "cpu":
        return Text(lowered.as_text(dialect="hlo", debug_info=True), dict(dp.mesh.shape))
    return Text(lowered.compile().as_text() or "", dict(dp.mesh.shape))


def _between_replicas(added: Sum, sizes: Mapping[str, int]) -> bool:
    """Whether a sum is not just within one replica, where devices add parts of a product."""
    axes = axes_of_group(added.group, sizes) if added.kind in BETWEEN_DEVICES else None
    return axes is None or not axes or bool({DATA, FSDP} & set(axes))


def _kind(added: Sum) -> str:
    return _BETWEEN if added.kind in BETWEEN_DEVICES else added.kind


def _listed(several: Sequence[Sum]) -> str:
    """List the first few sums: `bf16[50257,768], up to 8,192 terms (model.py:12)`."""
    named = []
    kind = _kind(several[0])
    most = "up to " if kind == SCATTER else ""
    of = "devices" if kind == _BETWEEN else "terms"
    for (shape, terms, place), group in itertools.groupby(several, key=_line):
        count = sum(each.count for each in group)
        times = f"{count:,} of " if count > 1 else ""
        named.append((count, f"{times}{shape}, {most}{terms:,} {of}{place}"))
    rest = sum(count for count, _ in named[_SHOWN:])
    shown = [text for _, text in named[:_SHOWN]]
    return ", ".join([*shown, *([f"and {rest:,} more"] if rest else [])])


def _line(added: Sum) -> tuple[str, int, str]:
    """Return the shape, terms and place by which sums are grouped."""
    place = added.source or added.op_name.rpartition("jit(update)/")[2]
    return added.shape, added.terms, f" ({place})" if place else ""


_WHAT = {
    SCATTER: "lookup gradients summed in {}",
    REDUCE: "sums in {}",
    _BETWEEN: "reductions between devices in {}",
}


def _fix(kind: str, dp: DataParallel) -> str:
    if kind == SCATTER:
        return "look up in float32: table.astype(float32)[ids].astype(x.dtype)"
    if kind == REDUCE:
        return (
            "cast to float32 first: x.astype(float32).sum(), or for a bias or a scale "
            "(x.astype(float32) + bias).astype(x.dtype)"
        )
    if not dp.mode.per_replica and MODES["shard_map"].holds(dp.layout):
        return "use mode='shard_map', which sums gradients in float32"
    return "cast to float32 before summing over devices"
