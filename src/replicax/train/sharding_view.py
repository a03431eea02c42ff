"""Where parameters, optimizer state and batch live, as text: a box for each part of an array."""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, Sharding

from replicax.core.batch import host_rows, row_count
from replicax.core.models.definition import PyTree
from replicax.core.update import TrainState
from replicax.wording import size_text

MOST_PARAMETERS = 3
MOST_DOWN = 8
"""Parts below each other; where there are more, ⋮ stands for some."""
BOX = 24
"""Columns inside a box, where there is room."""

Grid = tuple[tuple[tuple[int, ...], ...], ...]
"""Ids of the devices that hold each part: parts across within parts down."""


def sharding_view(state: TrainState, batch: PyTree | None, width: int = 80) -> list[str]:
    """The largest parameters, what the optimizer lays out differently of them, and the batch.

    Each array has a line with its path, dtype, shape, PartitionSpec and bytes on a device, and
    below those that are split alike is a drawing. Of more than two dims that are split, the first
    two are drawn. Nothing is run on a device, or read from one.

    Args:
        state: arrays, or `jax.ShapeDtypeStruct`s with a sharding.
        batch: the same, `[rows, ...]`; None where it is not known.
        width: columns of the terminal.
    """
    pictures: dict[Grid, list[_Array]] = {}
    for array in (*_of_state(state), *_arrays("batch", batch)):
        pictures.setdefault(_grid(array.shape, array.sharding), []).append(array)
    lines = ["shards a box is a part, with the devices that hold it; dim 0 runs down"]
    for grid, arrays in pictures.items():
        lines += _table(arrays, width)
        lines += _drawing(grid, width)
    if batch is None:
        lines.append("batch  split by rows; this source does not tell its shapes before it is read")
    return lines


def abstract_batch(source: Any, rows: int, sharding: Sharding) -> PyTree | None:
    """A batch of `source` without its values.

    Args:
        source: as for `DataParallel.feed`; nothing is read from it.
        rows: of the batch, with its padding.
        sharding: of each leaf.

    Returns:
        A tree of `jax.ShapeDtypeStruct`, or None where the source is not arrays: what it gives is
        known when it is read.

    Raises:
        DataError: leaves that disagree on the number of rows, or that no device can hold.
    """
    if not isinstance(source, (Mapping, tuple, np.ndarray, jax.Array)):
        return None
    row_count(source)

    def abstract(leaf: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((rows, *leaf.shape[1:]), leaf.dtype, sharding=sharding)

    none = jax.tree.map(lambda leaf: np.empty((0, *leaf.shape[1:]), leaf.dtype), source)
    return jax.tree.map(abstract, host_rows(none, copy=False))


@dataclasses.dataclass(frozen=True)
class _Array:
    path: str
    shape: tuple[int, ...]
    dtype: Any
    sharding: Sharding


def _arrays(prefix: str, tree: PyTree) -> list[_Array]:
    return [
        _Array(f"{prefix}{jax.tree_util.keystr(keys)}", leaf.shape, leaf.dtype, leaf.sharding)
        for keys, leaf in jax.tree_util.tree_leaves_with_path(tree)
    ]


def _of_state(state: TrainState) -> Iterator[_Array]:
    """The largest parameters, each with the optimizer's arrays of it that lie otherwise."""
    optimizer = _arrays("opt_state", state.opt_state)
    params = sorted(_arrays("params", state.params), key=lambda array: -math.prod(array.shape))
    for param in params[:MOST_PARAMETERS]:
        yield param
        path = param.path.removeprefix("params")
        for array in optimizer:
            if (
                array.path.endswith(path)
                and array.shape == param.shape
                and not array.sharding.is_equivalent_to(param.sharding, len(param.shape))
            ):
                yield array


def _grid(shape: tuple[int, ...], sharding: Sharding) -> Grid:
    slices: Mapping[Any, Any] = sharding.devices_indices_map(shape)
    starts = {
        device.id: tuple(part.start or 0 for part in index) for device, index in slices.items()
    }
    split = [dim for dim in range(len(shape)) if len({start[dim] for start in starts.values()}) > 1]
    down = split[0] if split[1:] or split == [0] else None
    across = next((dim for dim in split if dim != down), None)
    cells: dict[tuple[int, int], list[int]] = {}
    for device, start in sorted(starts.items()):
        place = [0 if dim is None else start[dim] for dim in (down, across)]
        cells.setdefault((place[0], place[1]), []).append(device)
    rows, columns = (sorted({place[axis] for place in cells}) for axis in (0, 1))
    return tuple(tuple(tuple(cells[row, column]) for column in columns) for row in rows)


def _table(arrays: list[_Array], width: int) -> list[str]:
    """A line for each array, in columns; where `width` is short, the path loses its beginning."""
    facts = []
    for array in arrays:
        shape = ", ".join(map(str, array.shape))
        part = array.sharding.shard_shape(array.shape)
        size = size_text(math.prod(part) * array.dtype.itemsize)
        facts.append((f"{array.dtype}[{shape}]", _spec(array.sharding), f"{size}/device"))
    widths = [max(map(len, column)) for column in zip(*facts, strict=True)]
    room = max(width - sum(widths) - 2 * len(widths), 16)
    paths = [_cut(array.path, room) for array in arrays]
    widths = [max(map(len, paths)), *widths]
    return [
        "  ".join(
            text.ljust(size) for text, size in zip((path, *row), widths, strict=True)
        ).rstrip()
        for path, row in zip(paths, facts, strict=True)
    ]


def _drawing(grid: Grid, width: int) -> list[str]:
    labels = [[_label(devices) for devices in row] for row in grid]
    longest = max(len(label) for row in labels for label in row)
    rows = [_shortened(row, (width - 1) // (longest + 3), "…") for row in labels]
    rows = _shortened(rows, MOST_DOWN, ["⋮"] * len(rows[0]))
    inside = max(longest + 2, min(BOX, (width - 1) // len(rows[0]) - 1))
    edge = ["─" * inside] * len(rows[0])
    lines = [f"┌{'┬'.join(edge)}┐"]
    for row in rows:
        lines += [f"│{'│'.join(label.center(inside) for label in row)}│", f"├{'┼'.join(edge)}┤"]
    return [*lines[:-1], f"└{'┴'.join(edge)}┘"]


def _shortened(items: list[Any], most: int, instead: Any) -> list[Any]:
    """`items`, or the first ones and the last where there are more than `most`."""
    most = max(most, 3)
    return items if len(items) <= most else [*items[: most - 2], instead, items[-1]]


def _label(devices: tuple[int, ...]) -> str:
    first, last = devices[0], devices[-1]
    if len(devices) > 2 and last - first == len(devices) - 1:
        return f"{first}-{last}"
    text = " ".join(map(str, devices))
    return text if len(text) <= BOX - 2 else f"{first} {devices[1]} … {last}"


def _spec(sharding: Sharding) -> str:
    if not isinstance(sharding, NamedSharding):
        return type(sharding).__name__
    return f"P({', '.join(map(repr, sharding.spec))})"


def _cut(path: str, room: int) -> str:
    return path if len(path) <= room else f"…{path[1 - room :]}"
