"""Two trees of arrays, leaf by leaf: where they differ by more than rounding explains.

How much rounding explains is measured and not guessed. The reference is run again on parameters and
inputs that are moved by a few units in the last place, at random, and what that moves in its
results is what rounding can move: little in a well-conditioned model, much where relu or max pool
choose between candidates a rounding apart, everything where a gradient is 0 in exact arithmetic.
(Stochastic arithmetic: CESTAC, Vignes 1993; Monte Carlo arithmetic, Parker 1997.)
"""

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn, jaxprs_in_params

PyTree = Any
Leaves = dict[str, np.ndarray]
"""Path -> values: float64 where the leaf holds floats, else as they are."""

UNITS = 4
"""How far inputs are moved: relative, in units of the dtype's eps."""
SEEDS = 4
"""Perturbed runs."""
SAFETY = 8
"""Rounding may do this many times what the perturbed runs show: they are few."""
_BULK = 0.9
"""An element that no perturbed run moved may still move as most of its leaf does."""
_MISSED = 1e-4
"""The share of a leaf's elements that a few perturbed runs may miss."""
_COARSE = 2.0**-9
"""Perturbations stop at this size: more would be another model, not rounding."""

MISSING, SHAPE, NOT_NUMBERS = "is missing", "has shape", "holds NaN or infinity"


@dataclasses.dataclass(frozen=True)
class Difference:
    """One leaf that differs by more than its bound."""

    path: str
    largest: float
    """The difference, in absolute value, of the element that exceeds its bound the most."""
    scale: float
    """The largest absolute value of the leaf that was expected."""
    bound: float
    """Difference that rounding explains in that element, in absolute value."""
    elements: int
    """Elements beyond their bounds, of `size`."""
    size: int
    ratio: float | None
    """Found over expected, where that is one number for the whole leaf."""
    relative: float
    """Norm of the difference over the norm of what was expected."""
    what: str = ""
    """Where it is not a matter of size: that it is missing, NaN, or of another shape."""

    def __str__(self) -> str:
        where = self.path or "the result"
        if self.what:
            return f"{where} {self.what}"
        if self.ratio is not None and abs(self.ratio - 1) > 1e-2:
            return f"{where} is {self.ratio:.4g} times what one device gives"
        share = self.largest / self.scale if self.scale else math.inf
        bound = self.bound / self.scale if self.scale else 0.0
        count = f", {self.elements} of {self.size} elements" if self.size > 1 else ""
        if not self.scale:
            return f"{where} differs by {self.largest:.1e} where 0 was expected{count}"
        return f"{where} differs by {share:.1e} of its scale (bound {bound:.1e}{count})"

    def to_json(self) -> dict[str, Any]:
        """Fields as `json.dumps` takes them; infinities become None."""
        values = dataclasses.asdict(self)
        return {
            key: None if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in values.items()
        }


def leaves(tree: PyTree) -> Leaves:
    """The arrays of a tree by path; what is no array (a function, a string) is left out."""
    found: Leaves = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        values = _values(leaf)
        if values is not None:
            found[jax.tree_util.keystr(path)] = values
    return found


def changes(before: PyTree, after: PyTree) -> Leaves:
    """Return what a step added to each leaf of floats, in float64; other leaves as they are now.

    A change is compared rather than the value itself because an update is small beside its
    parameter: of 1e-5 on 0.1, the bound of the parameter would hide a tenth.
    """
    old, new = leaves(before), leaves(after)
    return {
        path: value - old[path]
        if path in old and is_float(value) and old[path].shape == value.shape
        else value
        for path, value in new.items()
    }


def is_float(values: np.ndarray) -> bool:
    """Whether a leaf is compared within bounds; others have to be equal."""
    return bool(np.issubdtype(values.dtype, np.inexact))


def perturbed(tree: PyTree, seed: int, size: float, *, whole: bool = True) -> PyTree:
    """The tree with each float moved by `size` of itself, up or down at random.

    A 0 stays 0, so that what is exact (a padded pixel, a fresh bias) stays it. Leaves of `whole`
    numbers only are not moved in a batch, where they are labels, masks or indices.
    """
    generator = np.random.default_rng(seed)

    def moved(leaf: Any) -> Any:
        dtype = getattr(leaf, "dtype", None)
        if dtype is None or not jnp.issubdtype(dtype, jnp.floating):
            return leaf
        values = np.asarray(leaf).astype(np.float64)
        if not whole and bool(np.all(values == np.rint(values))):
            return leaf
        signs = generator.integers(0, 2, values.shape) * 2 - 1
        # Below half a unit of a coarse leaf nothing would move: never less than its own eps.
        step = max(size, _eps(dtype))
        return (values * (1 + step * signs)).astype(dtype)

    return jax.tree.map(moved, tree)


def rounding_noise(
    run: Callable[[PyTree, PyTree], Mapping[str, np.ndarray]],
    state: PyTree,
    batch: PyTree,
    *,
    eps: float,
    expected: Mapping[str, np.ndarray],
) -> Leaves:
    """How far rounding can move each element of `expected`, which is `run(state, batch)`.

    It is the largest change over some runs, in absolute value. `eps` is the unit of the coarsest
    dtype that `run` computes in; see `coarsest_eps`.
    """
    size = min(UNITS * eps, max(eps, _COARSE))
    noise = {path: np.zeros(value.shape) for path, value in expected.items() if is_float(value)}
    for seed in range(SEEDS):
        other = run(
            perturbed(state, 2 * seed, size), perturbed(batch, 2 * seed + 1, size, whole=False)
        )
        for path, largest in noise.items():
            moved = np.abs(other[path] - expected[path])
            np.maximum(largest, np.where(np.isfinite(moved), moved, 0), out=largest)
    return noise


def bounds(
    expected: Mapping[str, np.ndarray],
    noise: Mapping[str, np.ndarray],
    *,
    terms: int,
    eps: float,
    values: Mapping[str, np.ndarray] | None = None,
) -> Leaves:
    """By path, the largest difference that rounding explains, element by element.

    The sum of what the perturbed runs show, with room; of eps · sqrt(terms) of the leaf's scale,
    the expected error of a sum in another order; and, for changes, of two units of the values that
    they were taken from. `terms` are the summands of the longest sum: rows.
    """
    result: Leaves = {}
    for path, value in expected.items():
        if not is_float(value) or path not in noise or not value.size:
            continue
        moved = noise[path]
        finite = np.abs(value[np.isfinite(value)])
        scale = float(finite.max()) if finite.size else 0.0
        bound = SAFETY * (moved + np.quantile(moved, _BULK)) + 4 * eps * math.sqrt(terms) * scale
        if values is not None and path in values and values[path].shape == value.shape:
            bound = bound + 2 * eps * (np.abs(values[path]) + np.abs(value))
        result[path] = bound
    return result


def differences(
    found: Mapping[str, np.ndarray],
    expected: Mapping[str, np.ndarray],
    bounds: Mapping[str, np.ndarray],
) -> list[Difference]:
    """All leaves, in the order of the tree, that differ by more than their bounds.

    A leaf without a bound has to be equal. One that is missing, or has another shape, differs by
    infinity, and so does a NaN where a number was expected.
    """
    all_of = (
        _difference(path, found.get(path), there, bounds.get(path, 0.0))
        for path, there in expected.items()
    )
    return [each for each in all_of if each is not None]


def _difference(
    path: str, here: np.ndarray | None, there: np.ndarray, bound: np.ndarray | float
) -> Difference | None:
    if here is None:
        return _of_another_kind(path, there, MISSING)
    if here.shape != there.shape:
        shapes = f"{SHAPE} {list(here.shape)} where {list(there.shape)} was expected"
        return _of_another_kind(path, there, shapes)
    if not is_float(there):
        unequal = int(np.sum(here != there))
        count = f"has {unequal} of {there.size} elements that are not equal"
        return _of_another_kind(path, there, count) if unequal else None
    if not there.size:
        return None
    if not np.isfinite(here).all() and np.isfinite(there).all():
        return _of_another_kind(path, there, NOT_NUMBERS)
    limit = np.broadcast_to(np.asarray(bound), there.shape)
    same = (here == there) | (np.isnan(here) & np.isnan(there))
    gap = np.where(same, 0.0, np.abs(here - there))
    gap = np.where(np.isnan(gap), np.inf, gap)
    beyond = gap > limit
    if not beyond.any() or _only_missed(gap, limit, beyond):
        return None
    worst = np.unravel_index(int(np.argmax(gap - limit)), gap.shape)
    norm = float(np.linalg.norm(there[np.isfinite(there)]))
    apart = float(np.linalg.norm(gap))
    return Difference(
        path,
        float(gap[worst]),
        float(np.max(np.abs(there), where=np.isfinite(there), initial=0.0)),
        float(limit[worst]),
        int(beyond.sum()),
        there.size,
        constant_ratio(here, there, limit),
        apart / norm if norm else math.inf,
    )


def _only_missed(gap: np.ndarray, limit: np.ndarray, beyond: np.ndarray) -> bool:
    """Whether only elements differ that the perturbed runs missed by chance.

    Of millions, some have a gradient so near to 0 that Adam's step of it may go either way; one
    that no perturbed run turned still differs no further than those that were turned.
    """
    few = int(beyond.sum()) <= _MISSED * gap.size
    return few and float(gap.max()) <= float(np.max(limit))


def _of_another_kind(path: str, expected: np.ndarray, what: str) -> Difference:
    size = expected.size
    return Difference(path, math.inf, 0.0, 0.0, size, size, None, math.inf, what)


def constant_ratio(
    found: np.ndarray, expected: np.ndarray, bound: np.ndarray | float = 0.0, near: float = 1e-3
) -> float | None:
    """Found over expected where it is one number for all elements, within bounds or `near`."""
    square = float(np.sum(expected * expected))
    if not (np.isfinite(found).all() and np.isfinite(square) and square > 0):
        return None
    ratio = float(np.sum(found * expected)) / square
    rest = np.abs(found - ratio * expected)
    # Norms for the second: single elements that cancel carry few digits.
    is_near = np.linalg.norm(rest) <= near * abs(ratio) * math.sqrt(square)
    within = bool(np.all(rest <= max(1.0, abs(ratio)) * bound)) and abs(ratio) > 1e-6
    return ratio if is_near or within else None


def coarsest_eps(function: Callable[..., Any], *arguments: Any) -> float:
    """The largest eps among the float dtypes that a function computes in, and of its arguments.

    Float32's where it cannot be traced and its arguments tell nothing.
    """
    arrays = jax.tree.leaves(arguments)
    with contextlib.suppress(Exception):  # not traceable as a whole: it may still run
        traced = equations(jax.make_jaxpr(function)(*arguments).jaxpr)
        arrays += [variable.aval for equation in traced for variable in equation.outvars]
    dtypes = {each.dtype for each in arrays if hasattr(each, "dtype")}
    floats = (dtype for dtype in dtypes if jnp.issubdtype(dtype, jnp.floating))
    return max(map(_eps, floats), default=2.0**-23)


def equations(jaxpr: Jaxpr) -> Iterator[JaxprEqn]:
    """Yield the equations of a jaxpr, and of those in it."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in jaxprs_in_params(equation.params):
            yield from equations(inner)


def _eps(dtype: Any) -> float:
    return float(jnp.finfo(dtype).eps)  # type: ignore[no-untyped-call]


def _values(leaf: Any) -> np.ndarray | None:
    dtype = getattr(leaf, "dtype", None)
    if dtype is None:
        return np.asarray(leaf) if isinstance(leaf, (bool, int, float)) else None
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return np.asarray(jax.random.key_data(leaf))
    values = np.asarray(leaf)
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return values.astype(np.complex128)
    return values.astype(np.float64) if jnp.issubdtype(dtype, jnp.floating) else values
