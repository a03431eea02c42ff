"""Comparison of layouts: the mesh that each uses, or the reason it cannot be run."""

from collections.abc import Callable, Iterator, Sequence
from typing import Final, Literal

import jax
from jax.sharding import Mesh

from replicax.bench.cases import STRONG, BenchCase, Placed, check_left
from replicax.core.placement.layout import LAYOUTS, Layout, LayoutName, as_layout
from replicax.core.placement.mesh import DATA, MODEL, STAGE, make_mesh
from replicax.core.placement.sharding_rules import Rules
from replicax.errors import ConfigError, choose
from replicax.text.wording import counted

ONE: Final = "replicated"
"""The baseline layout on one device, where all layouts are the same."""

AXES = {**dict.fromkeys(LAYOUTS, DATA), "model": MODEL, "stages": STAGE}
"""The mesh axis along which each layout places the devices."""

MODES_BY_DEFAULT = ("jit",)
"""The mode that supports every layout."""

AxisName = Literal["replicated", "zero1", "fsdp", "model", "stages"]
"""The names of `AXES`, for type checkers and editors."""
Arrangement = AxisName | tuple[LayoutName | Rules | Layout, Callable[[int], Mesh]]
"""A name of `AXES`, or a layout and `mesh(devices)`."""


def cases_of_layouts(
    layouts: Sequence[Arrangement],
    modes: Sequence[str],
    devices: Sequence[int],
    batch_size: int,
    rules: str | Rules | Layout,
    check: Callable[[BenchCase], None],
) -> tuple[list[BenchCase], list[str]]:
    """Return the cases of every layout in every mode, and a note for each that cannot be run.

    `model` and `stages`, with the layout `rules`, use the most devices along their axis that
    `check` accepts, and replicas for the rest. On 1 device there is one case per mode.

    Raises:
        ConfigError: an unknown layout, nothing to compare, or no case that can be measured.
    """
    for layout in layouts:
        if isinstance(layout, str):
            choose("layouts", layout, AXES, ", or a pair of a layout and mesh(devices)")
    if max(devices) == 1:
        raise ConfigError("all layouts are the same on 1 device: raise devices to at least 2")
    if not layouts:
        raise ConfigError("layouts=() is empty; bench compares at least 1 layout: add one")
    cases: list[BenchCase] = []
    notes: list[str] = []
    for count in devices:
        for mode in modes:
            for layout in layouts if count > 1 else (ONE,):
                try:
                    placed = _placed(layout, count, as_layout(rules))
                    candidates = (
                        BenchCase(mode, count, batch_size, (STRONG,), each) for each in placed
                    )
                    case = _first(candidates, check)
                    cases += [case] if case not in cases else []
                except ConfigError as error:
                    name = layout if isinstance(layout, str) else as_layout(layout[0])
                    where = counted(count, "device")
                    notes.append(f"{mode} {name} on {where} skipped: {error}")
    check_left(cases, notes)
    return cases, notes


def _placed(layout: Arrangement, devices: int, rules: Layout) -> Iterator[Placed]:
    """Yield the layout on each possible mesh, most preferred first."""
    attached = jax.devices()
    if not isinstance(layout, str):
        yield Placed(as_layout(layout[0]), layout[1](devices))
    elif AXES[layout] == DATA:
        yield Placed(as_layout(layout), make_mesh(devices, devices=attached))
    else:
        for size in range(devices, 1, -1):
            if devices % size == 0:
                split = {AXES[layout]: size}
                yield Placed(rules, make_mesh(devices // size, devices=attached, **split))


def _first(cases: Iterator[BenchCase], check: Callable[[BenchCase], None]) -> BenchCase:
    """Return the first case that can be run; if none can, raise the error of the first."""
    errors = []
    for case in cases:
        try:
            check(case)
            return case
        except ConfigError as error:
            errors.append(error)
    raise errors[0]
