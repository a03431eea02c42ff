"""A batch of fixed size: the user's rows, their mask, and values without rows.

Shapes, here and in this room:

    [real, ...]         arrays of the user, before padding
    [rows, ...]         arrays of a batch, with padding; global, split over the replicas
    [rows]              `mask` float32, `index` int32, `count` float32
    [held, ...]         the rows of a batch that this process's devices hold
    [steps, rows, ...]  the batches of a call of several steps
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.tree_util import register_dataclass, register_pytree_node

from replicax.core.data.host_arrays import refuse_keys
from replicax.core.data.loader_state import LoaderState
from replicax.core.ground.array_table import arrays_html, arrays_text
from replicax.core.ground.leaves import PyTree
from replicax.text.arguments import answered


@answered
class Replicated:
    """Mark a value in a batch that has no rows: a clip range, a temperature, target parameters.

    Every replica and micro-batch sees the whole value, and changing it does not recompile. A loss
    receives the value itself; a custom step reads it as `batch["clip"].value`. In a job of several
    processes, all must pass the same value.

    Examples:
        >>> def loss(model, batch, key):
        ...     errors = batch["x"] @ model["w"] - batch["y"]
        ...     return jnp.clip(errors, -batch["clip"], batch["clip"]) ** 2
        >>> dp = rx.DataParallel(loss, optimizer)
        >>> state, metrics = dp.step(dp.init(model), {**source, "clip": rx.Replicated(0.2)})

    Args:
        value: a number, an array of any shape, or a pytree of these.
    """

    def __init__(self, value: PyTree) -> None:
        self.value = value

    def __repr__(self) -> str:
        return f"Replicated({self.value!r})"


@answered
class ExtraRows:
    """Mark rows in a batch of another number than its own: boundary points, labelled rows.

    A custom step passes it to `rx.value_and_grad` or `rx.mean` instead of the batch, and these use
    all rows of the set: it is padded and split over the replicas by itself. The other arrays of the
    batch are its own rows.

    Examples:
        >>> def step(state, batch, key):
        ...     means, gradient = rx.value_and_grad(loss)(state, batch["labelled"], key)
        ...     spread = rx.mean(batch["labelled"].map(lambda rows: rows["y"] ** 2))
        ...     state = jax.tree.map(lambda leaf, slope: leaf - 0.1 * slope, state, gradient)
        ...     return state, {**means, "spread": spread, "all": rx.mean(batch["x"][:, 0])}
        >>> dp = rx.DataParallel(step=step)
        >>> labelled = rx.ExtraRows({"x": source["x"][:10], "y": source["y"][:10]})
        >>> state, metrics = dp.step(dp.init(model), {"x": source["x"], "labelled": labelled})

    Args:
        value: a pytree of arrays `[rows of the set, ...]`.
    """

    def __init__(self, value: PyTree) -> None:
        self.rows: Batch | None = value if isinstance(value, Batch) else None
        """The set as a batch of its own, once it is padded; that is when it has a mask."""
        self.value = value.data if isinstance(value, Batch) else value
        """In a step, the rows that it sees."""

    def __repr__(self) -> str:
        return f"ExtraRows({self.value!r})"

    def map(self, function: Callable[[PyTree], PyTree]) -> "ExtraRows":
        """Return the set with `function` of its value, which must have the same rows."""
        found = function(self.value)
        return ExtraRows(found if self.rows is None else dataclasses.replace(self.rows, data=found))


@dataclasses.dataclass(frozen=True, eq=False)
class _Held:
    """The value of a `Replicated`, kept out of its leaves so that maps over rows skip it."""

    value: PyTree

    def __eq__(self, other: object) -> bool:  # by identity: arrays would be read from devices
        return isinstance(other, _Held) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


register_pytree_node(
    Replicated, lambda shared: ((), _Held(shared.value)), lambda held, _: Replicated(held.value)
)
register_pytree_node(
    ExtraRows,
    lambda rows: ((), _Held(rows.value if rows.rows is None else rows.rows)),
    lambda held, _: ExtraRows(held.value),
)


@dataclasses.dataclass(frozen=True)
class Batch:
    """Input of `DataParallel.step`: every array has the same leading row dim.

    Padding repeats real rows, so a model sees ordinary inputs, and has mask 0, so padded rows have
    zero weight in the loss, the gradient, and the metrics.

    Examples:
        >>> batch = next(iter(dp.feed(source, batch_size=32)))
        >>> batch
        Batch(32 rows: x float32[32, 3], y float32[32])
        >>> float(batch.mask.sum())
        32.0
    """

    data: PyTree
    """The user's batch: a pytree of arrays `[rows, ...]`."""
    mask: Any
    """float32 `[rows]`: 1 for a real row, 0 for padding."""
    index: Any
    """int32 `[rows]`: the row's index in its source. Padding has the index of the repeated row."""
    rows: int | None = None
    """Number of real rows, known on the host without a device sync; None if unknown."""
    feed_padding: int | None = None
    """Maximum number of padding rows in any batch of the same feed, if known in advance."""
    shared: tuple[PyTree, ...] = ()
    """Values of each `Replicated` in `data`, in order, once they are arrays on the devices."""
    sets: tuple["Batch", ...] = ()
    """Each `ExtraRows` in `data`, in order, as a batch of its own, once it is on the devices."""
    host: PyTree = None
    """This process's rows on the host, if the feed has to read them in order."""
    source_state: LoaderState | None = None
    """State of this process's source after this batch, if it has any."""
    number: int = 0
    """Which of the sets of a batch it is, from 1; 0 for a batch that is none."""
    count: Any = None
    """float32 `[rows]`: the number of real rows of the whole batch, with each row, so that every
    part of a batch has it; None if unknown."""

    def __repr__(self) -> str:
        return f"Batch({self._rows_text()}: {arrays_text(self.data, 'data')})"

    def _repr_html_(self) -> str:
        return arrays_html(f"Batch of {self._rows_text()}", self.data, "data")

    def _rows_text(self) -> str:
        shape = getattr(self.mask, "shape", ())  # of arrays; a tree of others has none
        size = f"{shape[0]:,}" if shape else "?"
        real = (
            "" if self.rows is None or size == f"{self.rows:,}" else f", {self.rows:,} of them real"
        )
        shared = len(self.shared)
        return f"{size} rows{real}{f', {shared} shared' if shared else ''}"

    def apart(self) -> "Batch":
        """Return the batch with each `Replicated` and `ExtraRows` moved out of `data`.

        They are then in `shared` and `sets`, unchanged.
        """
        places = jax.tree_util.tree_leaves_with_path(self.data, is_leaf=_is_marked)
        for path, node in places:
            value = node.value if isinstance(node, Replicated) else ()  # rows were looked at before
            for below, leaf in jax.tree_util.tree_leaves_with_path(value):
                refuse_keys((*path, *below), leaf)
        nodes = [node for _, node in places]
        values = tuple(node.value for node in nodes if isinstance(node, Replicated))
        sets: tuple[Any, ...] = tuple(node.rows for node in nodes if isinstance(node, ExtraRows))
        if not (values or sets):
            return self
        data = map_marked(lambda node: type(node)(None), self.data)
        return dataclasses.replace(self, data=data, shared=values, sets=sets)

    def whole(self) -> "Batch":
        """Return the batch with `shared` and `sets` moved back into `data`, undoing `apart`."""
        if not (self.shared or self.sets):
            return self
        values, sets = iter(self.shared), iter(self.sets)

        def with_value(node: Replicated | ExtraRows) -> Replicated | ExtraRows:
            return (
                Replicated(next(values)) if isinstance(node, Replicated) else ExtraRows(next(sets))
            )

        data = map_marked(with_value, self.data)
        return dataclasses.replace(self, data=data, shared=(), sets=())

    def map_rows(self, function: Callable[[Any], Any]) -> "Batch":
        """Return the batch with `function` of each array of its rows, not of `shared` or `sets`."""
        rows: Batch = jax.tree.map(function, dataclasses.replace(self, shared=(), sets=()))
        return dataclasses.replace(rows, shared=self.shared, sets=self.sets)

    @property
    def first(self) -> "Batch":
        """The batch itself, which a feed may also yield as the first of several."""
        return self

    @property
    def size(self) -> int:
        """Number of rows including padding: the fixed size the step is compiled for."""
        return int(self.mask.shape[0])

    @property
    def counts(self) -> Any:
        """The number of real rows of the whole batch, of each row; that of all these if unknown."""
        return self.size if self.count is None else self.count


register_dataclass(
    Batch,
    ["data", "mask", "index", "count", "shared", "sets"],
    ["number"],
    drop_fields=["rows", "feed_padding", "host", "source_state"],
)


def unshared(data: PyTree) -> PyTree:
    """Return `data` with each `Replicated` replaced by its value."""
    return map_marked(lambda node: node.value if isinstance(node, Replicated) else node, data)


def map_marked(function: Callable[[Any], Any], data: PyTree) -> PyTree:
    """Return `data` with `function` of each `Replicated` and `ExtraRows`."""
    return jax.tree.map(
        lambda node: function(node) if _is_marked(node) else node, data, is_leaf=_is_marked
    )


def _is_marked(node: Any) -> bool:
    return isinstance(node, Replicated | ExtraRows)


def mask_and_count(held: np.ndarray, rows: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return `Batch.mask` and `Batch.count` at the positions `held` of a batch whose first `rows`
    are real; `rows` may be int `[steps, 1]`.
    """
    mask = (held < rows).astype(np.float32)
    return mask, np.full_like(mask, rows)
