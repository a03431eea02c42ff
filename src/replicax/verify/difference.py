"""Compare two trees of arrays leaf by leaf and report differences that rounding cannot explain.

The effect of rounding is measured, not guessed. The reference is run again on parameters and inputs
that are randomly perturbed by a few units in the last place, and the resulting changes bound what
rounding can do: little in a well-conditioned model, much where relu or max pool choose between
nearly equal candidates, and everything where a gradient is 0 in exact arithmetic.
(Stochastic arithmetic: CESTAC, Vignes 1993; Monte Carlo arithmetic, Parker 1997.)
"""

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, jaxprs_in_params

from replicax.core.ground.leaves import PyTree

Leaves = dict[str, np.ndarray]
"""Path -> values: float64 for leaves of floats, others unchanged."""

UNITS = 4
"""Relative size of a perturbation, in units of the dtype's eps."""
SEEDS = 4
"""Number of perturbed runs."""
SAFETY = 8
"""Rounding may change this many times as much as the perturbed runs, which are few."""
_BULK = 0.9
"""An element that no perturbed run changed may still change as much as this share of its leaf."""
_MISSED = 1e-4
"""Share of a leaf's elements that the perturbed runs may miss."""
_COARSE = 2.0**-9
"""Largest perturbation: more would be a different model, not rounding."""

MISSING, SHAPE, NOT_NUMBERS = "is missing", "has shape", "contains NaN or infinity"


@dataclasses.dataclass(frozen=True)
class Difference:
    """A leaf that differs by more than its bound."""

    path: str
    largest: float
    """Absolute difference of the element that exceeds its bound the most."""
    scale: float
    """Largest absolute value of the expected leaf."""
    bound: float
    """Absolute difference that rounding explains in that element."""
    elements: int
    """Number of elements beyond their bounds, of `size`."""
    size: int
    ratio: float | None
    """Found over expected, if it is the same for the whole leaf."""
    relative: float
    """Norm of the difference over the norm of the expected leaf."""
    what: str = ""
    """A difference other than magnitude: missing, NaN, or the wrong shape."""

    def __str__(self) -> str:
        where = self.path or "the result"
        if self.what:
            return f"{where} {self.what}"
        if self.ratio is not None and abs(self.ratio - 1) > 1e-2:
            return f"{where} is {self.ratio:.4g} times the value on one device"
        share = self.largest / self.scale if self.scale else math.inf
        bound = self.bound / self.scale if self.scale else 0.0
        count = f", {self.elements} of {self.size} elements" if self.size > 1 else ""
        if not self.scale:
            return f"{where} differs by {self.largest:.1e} where 0 was expected{count}"
        return f"{where} differs by {share:.1e} of its scale (bound {bound:.1e}{count})"

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON values; infinities become None."""
        values = dataclasses.asdict(self)
        return {
            key: None if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in values.items()
        }


def leaves(tree: PyTree) -> Leaves:
    """Return the arrays of a tree by path; other leaves (functions, strings) are left out."""
    found: Leaves = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        values = _values(leaf)
        if values is not None:
            found[jax.tree_util.keystr(path)] = values
    return found


def step_changes(before: PyTree, after: PyTree) -> Leaves:
    """Return the change of each leaf of floats in a step, in float64; other leaves as they are now.

    Changes are compared rather than values because an update is small relative to its parameter:
    for an update of 1e-5 to 0.1, the bound of the parameter would hide an error of a tenth.
    """
    old, new = leaves(before), leaves(after)
    return {
        path: value - old[path]
        if path in old and is_float(value) and old[path].shape == value.shape
        else value
        for path, value in new.items()
    }


def stored_rounding(tree: PyTree) -> Leaves:
    """Return by path two units in the last place of each float of a tree, in its own dtype."""
    found: Leaves = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        values = _values(leaf)
        if values is not None and is_float(values):
            found[jax.tree_util.keystr(path)] = 2 * _eps(jnp.result_type(leaf)) * np.abs(values)
    return found


def is_float(values: np.ndarray) -> bool:
    """Whether a leaf is compared within bounds; others must be equal."""
    return bool(np.issubdtype(values.dtype, np.inexact))


def perturbed(tree: PyTree, seed: int, size: float, *, whole: bool = True) -> PyTree:
    """Return the tree with each float scaled by 1 + `size` or 1 - `size` at random.

    A 0 stays 0, so that exact values (a padded pixel, a fresh bias) stay exact. Without `whole`,
    leaves of whole numbers are kept: in a batch these are labels, masks or indices.
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
        # Less than half a unit of a coarse leaf would change nothing: use at least its own eps.
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
    """Return how much rounding can change each element of `expected`, which is `run(state, batch)`.

    This is the largest absolute change over the perturbed runs. `eps` is that of the coarsest
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
    stored: Mapping[str, np.ndarray],
) -> Leaves:
    """Return by path the largest difference that rounding explains, per element.

    It is the sum of the change in the perturbed runs, with a margin; eps · sqrt(terms) times the
    leaf's scale, the expected error of a sum in a different order; and, for changes, the rounding
    of the `stored` values that they are differences of. `terms` is the length of the longest sum:
    rows.
    """
    result: Leaves = {}
    for path, value in expected.items():
        if not is_float(value) or path not in noise or not value.size:
            continue
        moved = noise[path]
        finite = np.abs(value[np.isfinite(value)])
        scale = float(finite.max()) if finite.size else 0.0
        bound = SAFETY * (moved + np.quantile(moved, _BULK)) + 4 * eps * math.sqrt(terms) * scale
        if path in stored and stored[path].shape == value.shape:
            bound = bound + stored[path]
        result[path] = bound
    return result


def leaf_differences(
    found: Mapping[str, np.ndarray],
    expected: Mapping[str, np.ndarray],
    bounds: Mapping[str, np.ndarray],
) -> list[Difference]:
    """Return the leaves that differ by more than their bounds, in tree order.

    A leaf without a bound must be equal. A missing leaf, a different shape, or a NaN in place of
    a number counts as an infinite difference.
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
        count = f"has {unequal} of {there.size} elements unequal"
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
    """Whether all differing elements may have been missed by the perturbed runs by chance.

    Among millions of elements, some gradients are so close to 0 that the sign of Adam's update is
    arbitrary; one that no perturbed run flipped differs no more than those that were flipped.
    """
    few = int(beyond.sum()) <= _MISSED * gap.size
    return few and float(gap.max()) <= float(np.max(limit))


def _of_another_kind(path: str, expected: np.ndarray, what: str) -> Difference:
    size = expected.size
    return Difference(path, math.inf, 0.0, 0.0, size, size, None, math.inf, what)


def constant_ratio(
    found: np.ndarray, expected: np.ndarray, bound: np.ndarray | float = 0.0, near: float = 1e-3
) -> float | None:
    """Return found over expected if it is constant over all elements, within bounds or `near`."""
    square = float(np.sum(expected * expected))
    if not (np.isfinite(found).all() and np.isfinite(square) and square > 0):
        return None
    ratio = float(np.sum(found * expected)) / square
    rest = np.abs(found - ratio * expected)
    # `near` compares norms, since single elements that cancel carry few digits.
    is_near = np.linalg.norm(rest) <= near * abs(ratio) * math.sqrt(square)
    within = bool(np.all(rest <= max(1.0, abs(ratio)) * bound)) and abs(ratio) > 1e-6
    return ratio if is_near or within else None


def coarsest_eps(function: ClosedJaxpr | Callable[..., Any], arguments: Sequence[Any]) -> float:
    """Return the largest eps of the float dtypes of a function's arguments and operations.

    Float32's if it cannot be traced and no argument is a float.
    """
    arrays = jax.tree.leaves(arguments)
    with contextlib.suppress(Exception):  # not traceable as a whole: it may still run
        traced = (
            function if isinstance(function, ClosedJaxpr) else jax.make_jaxpr(function)(*arguments)
        )
        arrays += [out.aval for equation in equations(traced.jaxpr) for out in equation.outvars]
    dtypes = {each.dtype for each in arrays if hasattr(each, "dtype")}
    floats = (dtype for dtype in dtypes if jnp.issubdtype(dtype, jnp.floating))
    return max(map(_eps, floats), default=2.0**-23)


def equations(jaxpr: Jaxpr) -> Iterator[JaxprEqn]:
    """Yield the equations of a jaxpr and of its inner jaxprs."""
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
