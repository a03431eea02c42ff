"""The output of `--show-sharding`: the placement of parameters, optimizer state and batch."""

import math
import sys
from collections.abc import Iterator
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from replicax.core.ground.leaves import by_path
from replicax.core.ground.train_state import TrainState
from replicax.core.placement.layout import bytes_per_device
from replicax.core.placement.mesh import STAGE, by_rows
from replicax.core.placement.sharding_rules import split_axes
from replicax.text.table import width
from replicax.text.wording import size_text

MOST_NAMED = 3
"""Arrays listed individually, among those with the same placement."""
MOST_BOXES, MOST_ACROSS = 16, 8
"""Limits of a drawing; larger ones show only the PartitionSpec."""


Placement = tuple[tuple[str, ...], int]
"""Key of a drawing shared by several arrays: the mesh axes of size above 1 that shard them, in mesh
order, and the number of layers in a stack that pipeline stages shard, or 0."""


def print_sharding(state: TrainState, rows: int) -> None:
    """Print the sharding of a state and a batch: the largest arrays per placement, and a drawing.

    Each array is shown with its path, dtype, shape, PartitionSpec and bytes per device. Optimizer
    arrays are shown only if they are sharded differently from their parameter.
    """
    mesh = state.step.sharding.mesh
    shown: dict[Placement, list[tuple[str, Any]]] = {}
    for path, leaf in _arrays(state):
        shown.setdefault(_placement(leaf.sharding, leaf.shape), []).append((path, leaf))
    of_batch = by_rows(mesh)
    shown.setdefault(_placement(of_batch, (rows,)), [])
    print("shards a box is a shard, with the devices that hold it", flush=True)
    for placement, arrays in shown.items():
        for path, leaf in arrays[:MOST_NAMED]:
            text = f"{leaf.dtype}{list(leaf.shape)}  {_spec(leaf.sharding)}"
            text += f"  {size_text(bytes_per_device([leaf]))}/device"
            print(path, text, sep="  " if len(path) + 2 + len(text) <= width() else f"\n{' ' * 7}")
        if rest := arrays[MOST_NAMED:]:
            size = size_text(bytes_per_device(leaf for _, leaf in rest))
            print(f"and {len(rest)} more with the same placement, {size}/device")
        if placement == _placement(of_batch, (rows,)):
            print(f"batch  {rows} rows  {_spec(of_batch)}")
        _draw(mesh, placement)


def _arrays(state: TrainState) -> Iterator[tuple[str, Any]]:
    """Yield the parameters, largest first, and optimizer arrays that are sharded differently."""
    params, optimizer = by_path(state.params), by_path(state.opt_state)
    for path in sorted(params, key=lambda path: -params[path].size):
        param = params[path]
        yield f"params{path}", param
        for other, leaf in optimizer.items():
            apart = leaf.sharding.spec != param.sharding.spec
            if other.endswith(path) and leaf.shape == param.shape and apart:
                yield f"opt_state{other}", leaf


def _placement(sharding: NamedSharding, shape: tuple[int, ...]) -> Placement:
    axes = split_axes(sharding)
    return axes, shape[0] if STAGE in axes else 0


def _spec(sharding: NamedSharding) -> str:
    return f"P({', '.join(map(repr, sharding.spec))})"


def _draw(mesh: Mesh, placement: Placement) -> None:
    """Print boxes: pipeline stages, or else the last of two axes, side by side; others below.

    If there are too many, print only those of the stages, or none.
    """
    axes, layers = placement
    others = [axis for axis in axes if axis != STAGE]
    grids = [(others[:-1] or others, others[1:][-1:])]
    if STAGE in axes:
        grids = [(others, [STAGE]), ([], [STAGE])]
    for down, across in grids:
        shape = [math.prod(mesh.shape[axis] for axis in axes) for axes in (down, across)]
        if math.prod(shape) > MOST_BOXES or shape[1] > MOST_ACROSS:
            continue
        if STAGE in axes:
            size = layers // shape[1]
            firsts = range(0, layers, size)
            runs = [f"{first}-{first + size - 1}" if size > 1 else f"{first}" for first in firsts]
            print(f"layers {' | '.join(runs)}")
        held = NamedSharding(mesh, PartitionSpec(tuple(down) or None, tuple(across) or None))
        jax.debug.visualize_sharding(shape, held, scale=0.1, max_width=width())
        sys.stdout.flush()
        return
