"""Metrics that are no means: an object of each part of a batch, merged in the order of the parts.

An object is any pytree with `merge` and `compute`. In a program its arrays are those of the parts
of a batch, `[parts, ...]`, and they are merged there if merging leaves their shapes as they are.
Objects that grow, as they collect rows, are merged on the host, where padding is removed.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from replicax.core.ground.leaves import whole_on_host
from replicax.errors import LossError

Merge = Callable[[Any, Any], Any]
"""`merge(metric, other)`: the metric of the rows of both."""


@dataclasses.dataclass(frozen=True)
class Kind:
    """Common properties of the objects of all parts."""

    name: str
    """The name of the metric, for errors."""
    structure: Any
    constants: tuple[Any, ...]
    """Leaves that are no numbers, None in the place of each array."""
    dims: tuple[int, ...]
    """Number of dims of each array of one object."""
    by_row: tuple[bool, ...]
    """Whether an array has one entry for each row, and grows."""
    keeps_shape: bool
    """Whether objects can be merged in a program: merging leaves shapes and dtypes as they are."""
    merge: Merge
    in_order: bool = False
    """Whether its rows have an order, as those of a `HostMetric`."""

    def made(self, arrays: Iterator[Any]) -> Any:
        """Return an object with these arrays."""
        leaves = [next(arrays) if each is None else each for each in self.constants]
        return jax.tree.unflatten(self.structure, leaves)

    def arrays(self, metric: Any) -> list[Any]:
        """Return the arrays of an object of the same structure."""
        pairs = zip(jax.tree.leaves(metric), self.constants, strict=True)
        return [leaf for leaf, constant in pairs if constant is None]


@partial(jax.tree_util.register_dataclass, data_fields=["leaves", "mask"], meta_fields=["kind"])
@dataclasses.dataclass(frozen=True, repr=False)
class Merged:
    """A metric with `merge` and `compute`, of all rows of a step, as `dp.step` returns it.

    `float(merged)` is the value of a metric with one number.

    Examples:
        >>> def loss(model, batch, key):
        ...     errors = (batch["x"] @ model["w"] - batch["y"]) ** 2
        ...     return errors, {"median": rx.HostMetric(np.median, errors)}
        >>> dp = rx.DataParallel(loss, optimizer)
        >>> state, metrics = dp.step(dp.init(model), batch)
        >>> median = metrics["median"].compute()
    """

    leaves: tuple[Any, ...]
    """Arrays `[parts, ...]`; of several steps `[steps, parts, ...]`."""
    mask: Any
    """float32 `[parts, rows]`, 0 for padding; None if no array has an entry for each row."""
    kind: Kind

    @property
    def metric(self) -> Any:
        """The object itself, merged, on the host; waits for the step.

        Sums are float64 and int64; arrays with one entry for each row have no padding.
        """
        return functools.reduce(self.kind.merge, _parts(self))

    @property
    def grows(self) -> bool:
        """Whether the object grows with the number of rows, as one that collects them."""
        return not self.kind.keeps_shape

    def compute(self) -> Any:
        """Return what the object's `compute()` does; waits for the step.

        A number is a `float`, other arrays are NumPy's, and a dataclass is a dict. In a result of
        `dp.steps`, it is that of the rows of all steps; `merged[n]` is of step `n`.
        """
        total = Merging()
        total.add(self)
        return total.compute()

    def __float__(self) -> float:
        return float(self.compute())

    def __getitem__(self, step: int) -> "Merged":
        if self.leaves[0].ndim != self.kind.dims[0] + 2:
            raise TypeError(f"{self!r} is of one step: only those of dp.steps have an index")
        return jax.tree.map(lambda leaf: leaf[step], self)  # type: ignore[no-any-return]

    def __repr__(self) -> str:
        shapes = ", ".join(f"{leaf.dtype}{list(leaf.shape)}" for leaf in self.leaves)
        return f"Merged({self.kind.name}: {shapes})"


def apart(name: str, metric: Any, merge: Merge, mask: jax.Array) -> Merged:
    """Return the object that a loss made of the rows of `mask` as that of one part.

    `LossError` if it is no pytree of arrays, or cannot be merged.
    """
    leaves, structure = jax.tree.flatten(metric)
    kind = type(metric).__name__
    if not leaves or leaves[0] is metric:
        raise LossError(
            f"the metric {name!r} is a {kind}, which is no pytree of arrays: make it a dataclass "
            "registered with jax.tree_util.register_dataclass, or a flax.struct.dataclass"
        )
    numbers = [hasattr(leaf, "dtype") or isinstance(leaf, int | float) for leaf in leaves]
    constants = tuple(None if each else leaf for leaf, each in zip(leaves, numbers, strict=True))
    arrays = [jnp.asarray(leaf) for leaf, each in zip(leaves, numbers, strict=True) if each]
    dims = tuple(array.ndim for array in arrays)
    fixed = Kind(name, structure, constants, dims, (False,) * len(dims), True, merge)
    changed, keeps_shape = _probed(fixed, arrays)
    by_row = tuple(
        each and array.shape[:1] == mask.shape for each, array in zip(changed, arrays, strict=True)
    )
    if isinstance(metric, HostMetric) and not all(by_row):
        shapes = ", ".join(str(list(array.shape)) for array in arrays)
        raise LossError(
            f"the metric {name!r} is an rx.HostMetric of {shapes}, and there are {len(mask)} rows: "
            "give it one entry for each row"
        )
    found = dataclasses.replace(
        fixed, by_row=by_row, keeps_shape=keeps_shape, in_order=isinstance(metric, HostMetric)
    )
    return Merged(
        tuple(array[None] for array in arrays), mask[None] if any(by_row) else None, found
    )


def _probed(kind: Kind, arrays: list[jax.Array]) -> tuple[list[bool], bool]:
    """Return which arrays grow if two objects are merged, and whether a program can merge them."""

    def merge(one: list[Any], other: list[Any]) -> Any:
        return kind.merge(kind.made(iter(one)), kind.made(iter(other)))

    zeros = [np.zeros(array.shape, array.dtype) for array in arrays]
    shapes = [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in arrays]
    try:
        after = jax.eval_shape(lambda *both: kind.arrays(merge(*both)), shapes, shapes)
        same_structure = True
    except Exception:  # no operations of JAX, or another structure: it is merged on the host
        with jax.ensure_compile_time_eval():
            try:
                found = merge(zeros, list(map(np.copy, zeros)))
            except Exception as error:
                raise LossError(
                    f"two objects of the metric {kind.name!r} cannot be merged: "
                    f"{type(error).__name__}: {error}".partition("\n")[0]
                ) from error
        same_structure = jax.tree.structure(found) == kind.structure
        if not same_structure:
            return [True] * len(arrays), False
        after = kind.arrays(found)
    pairs = list(zip(arrays, after, strict=True))
    grows = [np.shape(new) != old.shape for old, new in pairs]
    traced = all(isinstance(new, jax.ShapeDtypeStruct) for new in after)
    return grows, traced and not any(grows) and all(new.dtype == old.dtype for old, new in pairs)


def merged_in_order(whole: Merged) -> Merged:
    """Return the object of all parts as that of one, if a program can merge them."""
    kind = whole.kind
    if not kind.keeps_shape or len(whole.leaves[0]) == 1:
        return whole

    def add(total: list[Any], part: list[Any]) -> tuple[list[Any], None]:
        return kind.arrays(kind.merge(kind.made(iter(total)), kind.made(iter(part)))), None

    first, rest = [leaf[0] for leaf in whole.leaves], [leaf[1:] for leaf in whole.leaves]
    total, _ = lax.scan(add, first, rest)
    return Merged(tuple(leaf[None] for leaf in total), None, kind)


def joined_parts(rows: dict[str, Any], join: Callable[[Any], Any]) -> dict[str, Any]:
    """Return the rows of a sequence of micro-batches, whose leaves are `[parts, ...]`.

    `join` puts rows `[parts, rows, ...]` in their order; a metric keeps its parts if it has none.
    """

    def joined(value: Any) -> Any:
        if isinstance(value, Merged) and value.kind.in_order:
            return jax.tree.map(lambda leaf: join(leaf[:, 0])[None], value)
        return jax.tree.map(join, value)

    return {name: joined(value) for name, value in rows.items()}


class Merging:
    """A metric merged on the host, over steps or the batches of an evaluation."""

    def __init__(self) -> None:
        self._total: Any = None
        self._kind: Kind | None = None

    def add(self, merged: Merged) -> None:
        """Merge the metric of one more step or batch, waiting for it."""
        for part in _parts(merged):
            if self._kind is None:
                self._total = part
            else:
                self._total = _on_host(merged.kind, merged.kind.merge, self._total, part)
            self._kind = merged.kind

    def compute(self) -> Any:
        """Return the value of all rows; see `Merged.compute`."""
        assert self._kind is not None
        return _plain(_on_host(self._kind, lambda metric: metric.compute(), self._total))

    @property
    def grows(self) -> bool:
        """Whether it grows, as in `Merged`."""
        return self._kind is not None and not self._kind.keeps_shape

    def save_state(self) -> list[Any]:
        """Return the arrays of a metric that does not grow, as JSON values."""
        assert self._kind is not None
        arrays = map(np.asarray, self._kind.arrays(self._total))
        return [[str(array.dtype), array.tolist()] for array in arrays]

    @staticmethod
    def resumed(state: list[Any], like: Merged) -> "Merging":
        """Return what `save_state` returned `state` of, for a metric of the kind of `like`."""
        found = Merging()
        found._kind = like.kind
        found._total = like.kind.made(np.asarray(values, dtype) for dtype, values in state)
        return found


def _parts(merged: Merged) -> Iterator[Any]:
    """Yield the object of each part on the host, without padding, its sums widened."""
    kind, real = merged.kind, np.zeros((0, 0), bool)
    if merged.mask is not None:
        mask = whole_on_host(merged.mask)
        real = mask.reshape(-1, mask.shape[-1]) > 0
    arrays = [
        leaf.reshape(-1, *leaf.shape[leaf.ndim - dims :])
        for leaf, dims in zip(map(whole_on_host, merged.leaves), kind.dims, strict=True)
    ]
    for n in range(len(arrays[0])):
        yield kind.made(
            array[n][real[n]] if by_row else _widened(array[n])
            for array, by_row in zip(arrays, kind.by_row, strict=True)
        )


def _widened(array: np.ndarray) -> np.ndarray:
    """Return a copy as float64 or int64: a float32 counts up to 2**24, and sums of many batches."""
    array = np.asarray(array)
    if jnp.issubdtype(array.dtype, jnp.floating):
        return array.astype(np.float64)
    return array.astype(np.int64) if array.dtype.kind == "i" else array.copy()


def _on_host(kind: Kind, function: Callable[..., Any], *metrics: Any) -> Any:
    """Return `function(*metrics)` with NumPy's arrays, or with JAX's if it needs these."""
    try:
        try:
            # As in JAX, 0 / 0 is NaN; functions of JAX keep float64.
            with np.errstate(all="ignore"), jax.enable_x64(True):
                return function(*metrics)
        except (AttributeError, TypeError):
            return function(*(jax.tree.map(_of_jax, metric) for metric in metrics))
    except Exception as error:
        error.add_note(f"in the metric {kind.name!r}")
        raise


def _of_jax(leaf: Any) -> Any:
    return jnp.asarray(leaf) if isinstance(leaf, np.ndarray | np.generic) else leaf


def _plain(value: Any) -> Any:
    """Return what `compute()` returned with Python's numbers and NumPy's arrays."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {str(name): _plain(each) for name, each in value.items()}
    if hasattr(value, "dtype") or isinstance(value, int | float):
        array = np.asarray(value)
        return array if array.ndim else float(array)
    return value


def named_values(name: str, value: Any) -> dict[str, Any]:
    """Return the values of a metric by name: those in a dict are `name/key`."""
    if not isinstance(value, dict):
        return {name: value}
    found: dict[str, Any] = {}
    for key, each in value.items():
        found |= named_values(f"{name}/{key}", each)
    return found


class HostMetric:
    """A metric that a function computes on the host from all rows at once, without padding.

    It needs no mask and no `merge`: the rows leave the program, and `function` gets those of all
    devices, processes, and batches of an evaluation. In training, records have the value of one
    step.

    Examples:
        >>> def loss(model, batch, key):
        ...     errors = jnp.abs(batch["x"] @ model["w"] - batch["y"])
        ...     return errors**2, {"median": rx.HostMetric(np.median, errors)}
        >>> dp = rx.DataParallel(loss, optimizer)
        >>> state, metrics = dp.step(dp.init(model), batch)
        >>> median = metrics["median"].compute()

    Args:
        function: `function(*rows, **named)` of NumPy arrays -> a number, an array, or a dict of
            these; such as `sklearn.metrics.roc_auc_score`.
        rows: pytrees of arrays `[rows, ...]`.
        named: the same, by name.
    """

    def __init__(self, function: Callable[..., Any], *rows: Any, **named: Any) -> None:
        self._function, self._chunks = function, ((rows, named),)

    def merge(self, other: "HostMetric") -> "HostMetric":
        """Return the metric of the rows of both."""
        return self._of(self._function, (*self._chunks, *other._chunks))

    def compute(self) -> Any:
        """Return `function` of all rows."""
        rows, named = jax.tree.map(lambda *parts: np.concatenate(parts), *self._chunks)
        return self._function(*rows, **named)

    @staticmethod
    def _of(function: Callable[..., Any], chunks: tuple[Any, ...]) -> "HostMetric":
        found = HostMetric(function)
        found._chunks = chunks
        return found


jax.tree_util.register_pytree_node(
    HostMetric, lambda each: ((each._chunks,), each._function), lambda f, c: HostMetric._of(f, c[0])
)
