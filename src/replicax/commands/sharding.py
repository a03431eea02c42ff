"""The output of `--show-sharding`: where parameters, optimizer state and batch live."""

import math
from collections.abc import Iterator
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from replicax.core.mesh import by_rows
from replicax.core.models.definition import PyTree
from replicax.core.update import TrainState
from replicax.wording import size_text

MOST_PARAMETERS = 3
MOST_BOXES = 16
"""In a drawing; where there are more, the PartitionSpec has to do."""


def print_sharding(state: TrainState, rows: int) -> None:
    """Print the largest parameters, what the optimizer lays out otherwise of them, and the batch.

    Each has a line with its path, dtype, shape, PartitionSpec and bytes on a device. Those that are
    split over the same axes have a drawing, of the first two dims that are split.

    Args:
        state: arrays, or `jax.ShapeDtypeStruct`s with a sharding.
        rows: of a batch, with its padding.
    """
    mesh = state.step.sharding.mesh
    shown: dict[tuple[Any, ...], list[str]] = {}
    for path, leaf in _largest(state):
        size = size_text(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize)
        text = f"{path}  {leaf.dtype}{list(leaf.shape)}  {_spec(leaf.sharding)}  {size}/device"
        shown.setdefault(tuple(filter(None, leaf.sharding.spec)), []).append(text)
    of_batch = by_rows(mesh)
    shown.setdefault(tuple(of_batch.spec), []).append(f"batch  {rows} rows  {_spec(of_batch)}")
    print("shards a box is a part, with the devices that hold it", flush=True)
    for axes, lines in shown.items():
        print(*lines, sep="\n", flush=True)
        drawn, shape = NamedSharding(mesh, PartitionSpec(*axes[:2])), (mesh.size, mesh.size)
        if math.prod(shape) // math.prod(drawn.shard_shape(shape)) <= MOST_BOXES:
            jax.debug.visualize_sharding(shape, drawn, use_color=False, scale=0.1)


def _largest(state: TrainState) -> Iterator[tuple[str, Any]]:
    """The largest parameters by path, each with the optimizer's arrays of it that lie otherwise."""
    params, optimizer = _by_path(state.params), _by_path(state.opt_state)
    for path in sorted(params, key=lambda path: -params[path].size)[:MOST_PARAMETERS]:
        param = params[path]
        yield f"params{path}", param
        for other, leaf in optimizer.items():
            apart = leaf.sharding.spec != param.sharding.spec
            if other.endswith(path) and leaf.shape == param.shape and apart:
                yield f"opt_state{other}", leaf


def _by_path(tree: PyTree) -> dict[str, Any]:
    return {jax.tree_util.keystr(path): x for path, x in jax.tree_util.tree_leaves_with_path(tree)}


def _spec(sharding: NamedSharding) -> str:
    """`P('data', None)`."""
    return f"P({', '.join(map(repr, sharding.spec))})"
