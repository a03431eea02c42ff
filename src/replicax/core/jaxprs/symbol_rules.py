"""Symbols of expressions, and rules, one per primitive, for combining those of its inputs."""

import dataclasses
import math
import zlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Symbols = Any
"""uint32 with the shape of the value; or the value itself as a numpy array, if it is known."""
ONCE = np.uint32(0)
Rule = Callable[[Any, str, list[Any], list[Any]], list[Any]]


@dataclasses.dataclass(frozen=True)
class Given:
    """The symbols of a variable whose rows are apart: they are made where they are needed."""

    number: int
    """Number of the variable: equal for corresponding variables of two traces."""
    shape: tuple[int, ...]
    rows: jax.Array | None = None
    """int `[rows]`: places in the whole batch; None if the variable does not depend on rows."""
    dim: int = 0
    each: int = 1
    """Where the rows are, and consecutive entries of each."""
    turn: Any = ONCE
    """A symbol of the iteration of a loop."""

    drawn: bool = False
    """Whether these are random numbers, which are as good for any other row."""

    def symbols(self) -> Symbols:
        """Return a symbol for each entry: of its row, and its place in that row."""
        if self.rows is None and not self.drawn:
            entries = jnp.arange(math.prod(self.shape)).reshape(self.shape)
            return hashed(self.number, self.turn, entries)
        others = [size for n, size in enumerate(self.shape) if n != self.dim]
        entries = jnp.expand_dims(jnp.arange(math.prod(others)).reshape(others), self.dim)
        if self.rows is None:
            return hashed(self.number, self.turn, jnp.broadcast_to(entries, self.shape))
        rows = jnp.repeat(self.rows, self.each) * self.each
        rows += jnp.arange(self.shape[self.dim]) % self.each
        rows = rows.reshape([-1 if n == self.dim else 1 for n in range(len(self.shape))])
        return hashed(self.number, self.turn, *jnp.broadcast_arrays(rows, entries))


@dataclasses.dataclass(frozen=True)
class Free:
    """Symbols of values that are computed from no row."""

    symbols: Symbols


def is_free(value: Any) -> bool:
    """Whether a value is computed from no row."""
    return isinstance(value, Free | np.ndarray) or (isinstance(value, Given) and value.rows is None)


def hashed(tag: object, *symbols: Any) -> Symbols:
    """Return the symbols of a function, named `tag`, of these symbols."""
    found: Any = np.uint32(zlib.crc32(str(tag).encode()))
    for each in symbols:
        found = _joined(found, each)
    return found


@jax.jit
def _joined(found: Any, each: Any) -> Symbols:
    found = (found ^ each.astype(jnp.uint32)) * jnp.uint32(0x9E3779B1)
    found = (found ^ found >> 15) * jnp.uint32(0x85EBCA77)
    return found ^ found >> 13


def symbols_of(value: Any) -> Symbols:
    """Return the symbols of known numbers, and those that were not made yet."""
    if isinstance(value, Given):
        return value.symbols()
    if isinstance(value, Free):
        return value.symbols
    if not isinstance(value, np.ndarray):
        return value
    wide = np.complex128 if jnp.issubdtype(value.dtype, jnp.inexact) else np.int64
    bits = np.ascontiguousarray(value.astype(wide)).reshape(-1).view(np.uint32)
    each = bits.reshape(value.size, -1).T
    return hashed("known", *(jnp.asarray(bits).reshape(value.shape) for bits in each))


def _place(shape: Sequence[int], dims: Sequence[int]) -> jax.Array:
    """Return the places of entries along `dims`, in an array that broadcasts to `shape`."""
    sizes = [size if n in dims else 1 for n, size in enumerate(shape)]
    return jnp.arange(math.prod(sizes)).reshape(sizes)


def _over(symbols: Symbols, dims: Sequence[int]) -> Symbols:
    """Return one symbol for all entries along `dims`, which are kept with size 1."""
    dims = [dim % max(symbols.ndim, 1) for dim in dims] if symbols.ndim else []
    each = hashed("over", *jnp.broadcast_arrays(symbols, _place(symbols.shape, dims)))
    return jnp.sum(each, axis=tuple(dims), keepdims=True, dtype=jnp.uint32)


def _spread(symbols: Symbols, shape: Sequence[int], number: int = 0) -> Symbols:
    """Return other symbols for all entries of `shape`, by their place along dims of size 1."""
    alone = [n for n in range(len(shape)) if symbols.shape[n] == 1]
    place = jnp.broadcast_to(_place(shape, alone), shape)
    return hashed(number, jnp.broadcast_to(symbols, shape), place)


def by_entry(tag: str, values: list[Symbols], shape: Sequence[int]) -> Symbols:
    """Return symbols of a function of each entry."""
    return hashed(tag, *(jnp.broadcast_to(each, shape) for each in values))


# Rules of primitives that combine entries: parameters, name, symbols of inputs, shapes of outputs.


def of_all(_params: Any, tag: str, values: list[Symbols], shapes: list[Any]) -> list[Symbols]:
    """Return symbols of a function of all entries."""
    each = hashed(tag, *(_over(value, range(value.ndim)).reshape(()) for value in values))
    return [_spread(each.reshape([1] * len(to)), to, n) for n, to in enumerate(shapes)]


def _along(
    dims: str, params: Any, tag: str, values: list[Symbols], shapes: list[Any]
) -> list[Symbols]:
    """Rule of primitives that combine all entries along the dims in this parameter."""
    along = params.get(dims, -1)
    over = along if isinstance(along, tuple) else (along,)
    each = hashed(tag, *(_over(value, over) for value in values))
    return [
        _spread(each, to, n) if len(to) == each.ndim else each.reshape(to)
        for n, to in enumerate(shapes)
    ]


def _dot(params: Any, tag: str, values: list[Symbols], shapes: list[Any]) -> list[Symbols]:
    contracted, batched = params["dimension_numbers"]
    found, [shape] = [], shapes
    for n, (value, summed, kept) in enumerate(zip(values, contracted, batched, strict=True)):
        others = [dim for dim in range(value.ndim) if dim not in (*summed, *kept)]
        each = jnp.transpose(_over(value, summed), (*kept, *others, *summed))
        sizes = [value.shape[dim] for dim in others]
        gap = [1] * (len(shape) - len(kept) - len(others))
        before, after = ([], gap) if n == 0 else (gap, [])
        found.append(each.reshape(*(value.shape[dim] for dim in kept), *before, *sizes, *after))
    return [by_entry(f"{tag} {params['dimension_numbers']}", found, shape)]


def _matrices(_params: Any, tag: str, values: list[Symbols], shapes: list[Any]) -> list[Symbols]:
    each = hashed(tag, *(_over(value, (-2, -1)) for value in values))
    kept = each.shape[:-2]
    return [
        _spread(each.reshape(*kept, *[1] * (len(to) - len(kept))), to, n)
        for n, to in enumerate(shapes)
    ]


def _convolution(params: Any, tag: str, values: list[Symbols], shapes: list[Any]) -> list[Symbols]:
    numbers, [shape] = params["dimension_numbers"], shapes
    if params["batch_group_count"] != 1:
        return of_all(params, tag, values, shapes)
    rows, left = numbers.out_spec[0], numbers.lhs_spec[0]
    each = _over(values[0], [dim for dim in range(len(shape)) if dim != left]).reshape(-1)
    each = hashed(tag, each, _over(values[1], range(len(shape))).reshape(1))
    return [_spread(each.reshape([-1 if n == rows else 1 for n in range(len(shape))]), shape)]


_REDUCING = "argmax argmin reduce_and reduce_max reduce_min reduce_or reduce_prod reduce_sum"
SYMBOL_RULES: dict[str, Rule] = {
    **dict.fromkeys(_REDUCING.split(), partial(_along, "axes")),
    **dict.fromkeys(
        ("cumlogsumexp", "cummax", "cummin", "cumprod", "cumsum", "top_k"), partial(_along, "axis")
    ),
    **dict.fromkeys(("cholesky", "eigh", "lu", "qr", "svd", "triangular_solve"), _matrices),
    "conv_general_dilated": _convolution,
    "dot_general": _dot,
    "sort": partial(_along, "dimension"),
}
