"""Values with one entry for each row of a batch, next to values without rows.

The user marks them as `ByRow`. In the arrays of a train state, an array so marked is a
`RowsOfState`, padded and split like the batch.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from replicax.core.ground.leaves import PyTree, by_path, whole_on_host
from replicax.errors import ConfigError, LossError
from replicax.text.arguments import answered


@answered
@partial(jax.tree_util.register_dataclass, data_fields=["value", "mask"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class ByRow:
    """Mark a value with one entry for each row of the batch.

    Among the metrics of a loss or a custom step it is not averaged, but returned: losses by row,
    features, samples. In the state of a custom step it stays with the rows, on their devices:
    hidden states, chains of a sampler, environments. Rows of padding keep their state.

    Examples:
        >>> def loss(model, batch, key):
        ...     errors = batch["x"] @ model["w"] - batch["y"]
        ...     return errors**2, {"error": rx.ByRow(errors)}
        >>> dp = rx.DataParallel(loss, optimizer)
        >>> state, metrics = dp.step(dp.init(model), batch)
        >>> metrics["error"].whole().shape
        (32,)
        >>> def step(state, batch, key):  # a running mean of each row
        ...     seen = 0.9 * state["seen"].value + 0.1 * batch["x"]
        ...     return {"seen": rx.ByRow(seen)}, {"loss": rx.mean(seen[:, 0])}
        >>> dp = rx.DataParallel(step=step)
        >>> state, metrics = dp.step(dp.init({"seen": rx.ByRow(jnp.zeros((32, 3)))}), batch)
    """

    value: PyTree
    """Arrays `[rows, ...]` of any dtype. Those that a step returned are sharded like its batch."""
    mask: Any = None
    """float32 `[rows]`: 0 for padding, which `value` includes; None if there is none."""

    def whole(self) -> PyTree:
        """Return NumPy arrays `[rows, ...]`, without padding, in the order of the batch.

        It waits for the step. In a job of several processes, all of them must call it.
        """
        if self.mask is None:
            return jax.tree.map(whole_on_host, self.value)
        real = whole_on_host(self.mask) > 0
        return jax.tree.map(lambda leaf: whole_on_host(leaf)[real], self.value)


def as_result(value: PyTree, mask: jax.Array) -> ByRow:
    """Return what a step returned by row; `mask` is that of its batch, a set has its own."""
    return value if isinstance(value, ByRow) else ByRow(value, mask)


def checked_rows(name: str, value: PyTree, rows: int) -> PyTree:
    """Return `value`; `LossError` if an array in it has not one entry for each of `rows`."""
    for path, leaf in (by_path(value) or {"": None}).items():
        shape = np.shape(leaf)
        if shape[:1] != (rows,):
            raise LossError(
                f"{name}{path} has shape {shape} in an rx.ByRow, and there are {rows} rows: give "
                "it one entry for each row"
            )
    return value


@partial(jax.tree_util.register_dataclass, data_fields=["value"], meta_fields=["real"])
@dataclasses.dataclass(frozen=True)
class RowsOfState:
    """The arrays of a `ByRow` in a state, `[rows, ...]`, with rows repeated as padding."""

    value: PyTree
    real: int
    """Number of rows that are no padding, the first ones."""

    @property
    def size(self) -> int:
        """Number of rows, including padding."""
        return int(jax.tree.leaves(self.value)[0].shape[0])


def padded_state(params: PyTree, padded: Callable[[int], int]) -> PyTree:
    """Return the arrays of a state with each `ByRow` as a `RowsOfState`.

    `padded` returns the size of a batch of so many rows. `ConfigError` if their numbers differ.
    """
    counts = {np.shape(leaf)[:1] for leaf in jax.tree.leaves(_nodes(ByRow, params))}
    if not counts:
        return params
    if len(counts) > 1 or () in counts:
        said = " and ".join(str(count[0]) if count else "no" for count in sorted(counts))
        raise ConfigError(
            f"the state has rx.ByRow arrays with {said} rows; all must have one entry for each "
            "row of a batch: give them the same number"
        )
    [(real,)] = counts
    size = padded(real)
    return _map_nodes(ByRow, lambda rows: RowsOfState(resized(rows.value, size), real), params)


def padded_rows(params: PyTree, padded: Callable[[int], int]) -> PyTree:
    """Return the arrays of a state, each `RowsOfState` padded as `padded_state` does it."""
    return map_rows_of_state(
        lambda rows: RowsOfState(resized(rows.value, padded(rows.real), rows.real), rows.real),
        params,
    )


def has_rows(model: PyTree) -> bool:
    """Whether a `ByRow` is in a state."""
    return bool(_nodes(ByRow, model))


def with_rows(model: PyTree, rows: int) -> PyTree:
    """Return a state for batches of so many `rows`: each `ByRow` in it cut, or repeated."""
    return _map_nodes(ByRow, lambda node: ByRow(resized(node.value, rows)), model)


def resized(value: PyTree, size: int, real: int | None = None) -> PyTree:
    """Return arrays, or shapes, with `size` rows: the first `real` ones, repeated."""

    def of_leaf(leaf: Any) -> Any:
        if len(leaf.shape) and leaf.shape[0] == size:
            return leaf
        if isinstance(leaf, jax.ShapeDtypeStruct):
            return leaf.update(shape=(size, *leaf.shape[1:]))
        return jnp.asarray(leaf)[np.arange(size) % (real or len(leaf))]

    return jax.tree.map(of_leaf, value)


def map_rows_of_state(function: Callable[[RowsOfState], Any], tree: PyTree) -> PyTree:
    """Return `tree` with each `RowsOfState` in it replaced by `function` of it."""
    return _map_nodes(RowsOfState, function, tree)


def real_rows(tree: PyTree) -> PyTree:
    """Return `tree` with the rows of each `RowsOfState` that are no padding; arrays or shapes."""
    return map_rows_of_state(
        lambda rows: dataclasses.replace(rows, value=jax.tree.map(_first(rows.real), rows.value)),
        tree,
    )


def _first(real: int) -> Callable[[Any], Any]:
    def of_leaf(leaf: Any) -> Any:
        if leaf.shape[0] == real:
            return leaf
        if isinstance(leaf, jax.ShapeDtypeStruct):
            return leaf.update(shape=(real, *leaf.shape[1:]), sharding=_everywhere(leaf))
        return leaf[:real]

    return of_leaf


def _everywhere(leaf: jax.ShapeDtypeStruct) -> jax.sharding.Sharding | None:
    """Return a sharding for any number of rows, on the same devices."""
    if isinstance(leaf.sharding, NamedSharding):
        return NamedSharding(leaf.sharding.mesh, PartitionSpec())
    return None


def padded_again(tree: PyTree, like: PyTree) -> PyTree:
    """Return `tree`, a result of `real_rows`, padded and laid out as the abstract `like`."""
    wanted = iter(rows_of_state(like))

    def padded(rows: RowsOfState) -> RowsOfState:
        to = next(wanted)
        shardings = jax.tree.map(lambda leaf: leaf.sharding, to.value)
        again = jax.jit(partial(resized, size=to.size, real=to.real), out_shardings=shardings)
        return RowsOfState(again(rows.value), to.real)

    return map_rows_of_state(padded, tree)


def rows_of_state(tree: PyTree) -> list[RowsOfState]:
    """Return each `RowsOfState` in `tree`."""
    return _nodes(RowsOfState, tree)


def is_rows_of_state(node: Any) -> bool:
    """Whether `node` is a `RowsOfState`."""
    return isinstance(node, RowsOfState)


def _nodes(kind: type[Any], tree: PyTree) -> list[Any]:
    leaves = jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, kind))
    return [leaf for leaf in leaves if isinstance(leaf, kind)]


def _map_nodes(kind: type[Any], function: Callable[[Any], Any], tree: PyTree) -> PyTree:
    return jax.tree.map(
        lambda node: function(node) if isinstance(node, kind) else node,
        tree,
        is_leaf=lambda node: isinstance(node, kind),
    )
