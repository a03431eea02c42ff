"""The arrays of a train state as a table: parts of the model, what trains, memory per device."""

import dataclasses
import math
import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax

from replicax.core.ground.train_state import TrainState
from replicax.core.placement.layout import bytes_per_device
from replicax.core.placement.sharding_rules import split_axes
from replicax.core.program import Program
from replicax.text.blocks import Entry, ReportBlock, Reported, report_of
from replicax.text.wording import counted, size_text

MOST_PARTS = 20
"""Parts that are listed, if shorter paths can make so few of them."""

_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")
"""A key of a path that is a number, such as that of a layer."""
_NAMES = {"params": "parameters", "extras": "other arrays", "opt_state": "optimizer"}
"""Fields of a state, where their own name does not say it."""


@dataclasses.dataclass(frozen=True)
class StatePart:
    """Arrays of one dtype whose paths begin alike and which are placed alike."""

    path: str
    """The dotted path or its beginning, in which `*` is any number."""
    arrays: tuple[Any, ...]
    """Their shapes, dtypes and shardings."""
    role: str
    """`trained`, `frozen`, `state` (BatchNorm's statistics, random streams), or empty in a custom
    step, which says itself what trains."""

    @property
    def numbers(self) -> int:
        """How many numbers they have in all."""
        return sum(math.prod(leaf.shape) for leaf in self.arrays)

    @property
    def bytes(self) -> int:
        """Bytes on each device."""
        return bytes_per_device(self.arrays)

    def __str__(self) -> str:
        shapes = {tuple(leaf.shape) for leaf in self.arrays}
        dtype, count = self.arrays[0].dtype, len(self.arrays)
        if len(shapes) > 1:
            text = f"{count} {dtype} arrays"
        else:
            times = f"{count} x " if count > 1 else ""
            text = f"{times}{dtype}{list(shapes.pop())}"
        axes = split_axes(self.arrays[0].sharding)
        return f"{text} over {', '.join(axes)}" if axes else text


@dataclasses.dataclass(frozen=True)
class StateSummary(Reported):
    """The arrays of a train state, printed as a table.

    Examples:
        >>> found = dp.summary(dp.init({"w": jnp.zeros(3), "b": jnp.zeros(())}))
        >>> found.parameters, found.trained, found.bytes_per_device["params"]
        (4, 4, 16)
    """

    parts: tuple[StatePart, ...]
    """The model: parameters and its other arrays."""
    bytes_per_device: dict[str, int]
    """Bytes on each device of each field of the state."""
    optimizer: StatePart
    """The arrays of the optimizer."""

    @property
    def parameters(self) -> int:
        """Number of parameters; of a custom step, all numbers of its state."""
        return self.count("trained", "frozen", "")

    @property
    def trained(self) -> int:
        """Number of parameters that train; 0 of a custom step, which says itself what trains."""
        return self.count("trained")

    def count(self, *roles: str) -> int:
        """Return how many numbers the parts with these roles have."""
        return sum(part.numbers for part in self.parts if part.role in roles)


def summary_of(program: Program) -> StateSummary:
    """Return the summary of a program's states."""
    state = program.abstract_state()
    fields = [field.name for field in dataclasses.fields(state) if field.name != "definition"]
    sizes = {name: bytes_per_device(jax.tree.leaves(getattr(state, name))) for name in fields}
    arrays = tuple(jax.tree.leaves(state.opt_state))
    return StateSummary(
        parts=_few(list(_leaves(program, state))),
        bytes_per_device={name: size for name, size in sizes.items() if size},
        optimizer=StatePart("optimizer", arrays, "state"),
    )


def _leaves(program: Program, state: TrainState) -> Iterator[StatePart]:
    """Yield a part for each array of the model."""
    params = jax.tree.leaves_with_path(state.params)
    read = program.updater.read or (True,) * len(params)
    custom = program.configuration.step is not None
    for (path, leaf), trains in zip(params, read, strict=True):
        role = "" if custom else "trained" if trains else "frozen"
        yield StatePart(_dotted(path), (leaf,), role)
    for path, leaf in jax.tree.leaves_with_path(state.extras):
        yield StatePart(_dotted(path), (leaf,), "state")


def _few(leaves: list[StatePart]) -> tuple[StatePart, ...]:
    """Return a part for each array or, if they are many, the longest beginnings that are few."""
    deepest = max(part.path.count(".") for part in leaves) + 1
    parts = _together(leaves, lambda path: path)
    for depth in range(deepest, 0, -1):
        if len(parts) > MOST_PARTS:
            parts = _together(leaves, partial(_beginning, depth))
    return parts


def _together(leaves: list[StatePart], name: Callable[[str], str]) -> tuple[StatePart, ...]:
    groups: dict[Any, list[StatePart]] = {}
    for part in leaves:
        (leaf,) = part.arrays
        alike = part.role, str(leaf.dtype), split_axes(leaf.sharding)
        groups.setdefault((name(part.path), *alike), []).append(part)
    return tuple(
        StatePart(path, tuple(leaf for part in parts for leaf in part.arrays), role)
        for (path, role, *_), parts in groups.items()
    )


def _beginning(depth: int, path: str) -> str:
    return ".".join(_NUMBER.sub("*", path).split(".")[:depth])


def _dotted(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".") or "model"


@report_of.register
def _report(summary: StateSummary) -> list[ReportBlock]:
    rows = [
        (part.path, f"{part.numbers:,}", size_text(part.bytes), part.role, str(part))
        for part in summary.parts
    ]
    return [
        Entry("model", [("", "numbers", "per device", "", ""), *rows]),
        Entry("total", _totals(summary)),
        Entry("memory", _memory(summary)),
    ]


def _totals(summary: StateSummary) -> str:
    count, trained, optimizer = summary.parameters, summary.trained, summary.optimizer
    said = [f"{count:,} parameters · {'all' if trained == count else f'{trained:,}'} trained"]
    if not trained:
        said = [f"{count:,} numbers of a custom step"]
    if others := summary.count("state"):
        said.append(f"{others:,} numbers that do not train")
    if optimizer.arrays:
        kept = counted(len(optimizer.arrays), "array")
        axes = ", ".join(
            dict.fromkeys(axis for leaf in optimizer.arrays for axis in split_axes(leaf.sharding))
        )
        over = f" over {axes}" if axes else ""
        said.append(f"optimizer: {optimizer.numbers:,} numbers in {kept}{over}")
    return " · ".join(said)


def _memory(summary: StateSummary) -> str:
    sizes = summary.bytes_per_device
    shown = [f"{_NAMES.get(name, name)} {size_text(size)}" for name, size in sizes.items()]
    return f"{size_text(sum(sizes.values()))} on each device: {', '.join(shown)}"
