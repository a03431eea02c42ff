"""The output of `--show-sharding`: where parameters, optimizer state and batch live."""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from replicax.core.mesh import STAGE, by_rows
from replicax.core.models.definition import PyTree
from replicax.core.partition import axes_of
from replicax.core.update import TrainState
from replicax.wording import size_text

COLUMNS = 80
MOST_NAMED = 3
"""Arrays with a line of their own, of those that lie alike."""
MOST_BOXES = 16
"""In a drawing; where there are more, the PartitionSpec has to do."""


@dataclasses.dataclass(frozen=True)
class Placement:
    """How arrays lie on a mesh: what all of them share that have one drawing."""

    axes: tuple[str, ...]
    """Those of more than one device that something is split over, in the order of the mesh."""
    layers: int = 0
    """In a stack that pipeline stages split."""


def print_sharding(state: TrainState, rows: int) -> None:
    """Print where a state and a batch lie: for each placement the largest arrays, and a drawing.

    An array has its path, dtype, shape, PartitionSpec and bytes on a device. Of the optimizer's
    arrays those are shown that lie otherwise than their parameter.

    Args:
        state: arrays, or `jax.ShapeDtypeStruct`s with a sharding.
        rows: of a batch, with its padding.
    """
    mesh = state.step.sharding.mesh
    shown: dict[Placement, list[tuple[str, Any]]] = {}
    for path, leaf in _arrays(state):
        shown.setdefault(_placement(leaf.sharding, leaf.shape), []).append((path, leaf))
    of_batch = by_rows(mesh)
    shown.setdefault(_placement(of_batch, (rows,)), [])
    print("shards a box is a part, with the devices that hold it", flush=True)
    for placement, arrays in shown.items():
        for path, leaf in arrays[:MOST_NAMED]:
            each = f"{leaf.dtype}{list(leaf.shape)}  {_spec(leaf.sharding)}"
            _print_line(path, f"{each}  {size_text(_bytes(leaf))}/device")
        if rest := arrays[MOST_NAMED:]:
            size = size_text(sum(_bytes(leaf) for _, leaf in rest))
            print(f"and {len(rest)} more that lie alike, {size}/device")
        if placement == _placement(of_batch, (rows,)):
            print(f"batch  {rows} rows  {_spec(of_batch)}")
        for line in _drawing(mesh, placement):
            print(line, flush=True)


def _arrays(state: TrainState) -> Iterator[tuple[str, Any]]:
    """The parameters by path, the largest first, and the optimizer's arrays that lie otherwise."""
    params, optimizer = _by_path(state.params), _by_path(state.opt_state)
    for path in sorted(params, key=lambda path: -params[path].size):
        param = params[path]
        yield f"params{path}", param
        for other, leaf in optimizer.items():
            apart = leaf.sharding.spec != param.sharding.spec
            if other.endswith(path) and leaf.shape == param.shape and apart:
                yield f"opt_state{other}", leaf


def _by_path(tree: PyTree) -> dict[str, Any]:
    return {jax.tree_util.keystr(path): x for path, x in jax.tree_util.tree_leaves_with_path(tree)}


def _bytes(leaf: Any) -> int:
    """Those of a leaf on one device."""
    shard: tuple[int, ...] = leaf.sharding.shard_shape(leaf.shape)
    return math.prod(shard) * int(leaf.dtype.itemsize)


def _placement(sharding: NamedSharding, shape: tuple[int, ...]) -> Placement:
    split, sizes = axes_of(sharding.spec), sharding.mesh.shape
    axes = tuple(axis for axis in sizes if axis in split and sizes[axis] > 1)
    return Placement(axes, shape[0] if STAGE in axes else 0)


def _spec(sharding: NamedSharding) -> str:
    """`P('data', None)`."""
    return f"P({', '.join(map(repr, sharding.spec))})"


def _print_line(path: str, text: str) -> None:
    """Print both on one line where that is short enough."""
    wide = len(path) + 2 + len(text) > COLUMNS
    print(f"{path}\n       {text}" if wide else f"{path}  {text}")


def _drawing(mesh: Mesh, placement: Placement) -> list[str]:
    """Boxes that fit: pipeline stages beside each other, else the last of two axes; others below.

    Where there are too many, those of the stages alone, or none.
    """
    stages = [axis for axis in placement.axes if axis == STAGE]
    others = [axis for axis in placement.axes if axis != STAGE]
    if stages:
        return _boxes(mesh, others, stages, placement.layers) or _boxes(
            mesh, [], stages, placement.layers
        )
    return _boxes(mesh, others[:-1] or others, others[1:][-1:], 0)


def _boxes(mesh: Mesh, down: list[str], across: list[str], layers: int) -> list[str]:
    """A box for each part over these axes; nothing where they are too many, or too wide."""
    rows, columns = (math.prod(mesh.shape[axis] for axis in axes) for axes in (down, across))
    if rows * columns > MOST_BOXES:
        return []
    held = NamedSharding(mesh, PartitionSpec(tuple(down) or None, tuple(across) or None))
    devices: dict[tuple[int, int], list[int]] = {}
    parts: Mapping[Any, Any] = held.devices_indices_map((rows, columns))
    for device, (above, left) in parts.items():
        devices.setdefault((above.start or 0, left.start or 0), []).append(device.id)
    kind = mesh.devices.flat[0].platform.upper()
    lines = [
        [f"{kind} {_ranges(devices[row, column])}" for column in range(columns)]
        for row in range(rows)
    ]
    if layers:
        own = layers // columns
        numbers = [list(range(stage * own, (stage + 1) * own)) for stage in range(columns)]
        said = [f"layer{'s' if own > 1 else ''} {_ranges(each)}" for each in numbers]
        lines[0] = [f"{text}\n{cell}" for text, cell in zip(said, lines[0], strict=True)]
    width = max(len(line) for row in lines for cell in row for line in cell.splitlines())
    edges = ["─" * (width + 2)] * columns
    drawn = [f"┌{'┬'.join(edges)}┐"]
    for row in lines:
        for texts in zip(*(cell.splitlines() for cell in row), strict=True):
            drawn.append(f"│ {' │ '.join(text.ljust(width) for text in texts)} │")
        drawn.append(f"├{'┼'.join(edges)}┤")
    drawn[-1] = f"└{'┴'.join(edges)}┘"
    return drawn if len(drawn[0]) <= COLUMNS else []


def _ranges(numbers: list[int]) -> str:
    """`0-3,8,9`: three or more in a row have a dash."""
    ordered = np.sort(numbers)
    runs = np.split(ordered, np.flatnonzero(np.diff(ordered) > 1) + 1)
    short = [f"{run[0]}-{run[-1]}" if len(run) > 2 else ",".join(map(str, run)) for run in runs]
    return ",".join(short)
