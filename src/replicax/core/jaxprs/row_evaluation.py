"""Evaluate a traced loss or step on arrays, with some of what it computes replaced.

Sums over all replicas become other numbers, and conditions and factors that do not depend on rows,
such as schedules and gates, random ones: what depends on them must not be overlooked.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, Literal

from replicax.core.jaxprs.jaxpr import RULED, bind_eqn, called, evaluate_jaxpr, of_scan
from replicax.core.jaxprs.row_counts import NUMBER, Origin
from replicax.core.jaxprs.row_dependence import DRAWING, RANDOM, STEPPED, SUMS_OF_REPLICAS, Follow
from replicax.core.jaxprs.row_labels import (
    DECLARED,
    ENTERED,
    GATHERED,
    LEFT,
    SEEN,
    SUMMED,
    label_of,
    row_dim,
)
from replicax.core.jaxprs.row_rules import ROW_RULES

_Values = dict[str, list[tuple[jax.Array, int | None]]]
"""Values that were seen, by label, and the dim of their rows."""


class Undecided(Exception):  # noqa: N818
    """Raised if numbers cannot tell whether rows depend on one another."""


@dataclasses.dataclass
class RowEvaluation:
    """Evaluates a jaxpr on arrays."""

    follow: Follow
    trial: jax.Array
    """int32: decides the numbers that replace others."""
    changes: jax.Array
    """bool: whether conditions and factors are replaced."""
    pinned: jax.Array
    """bool: whether random numbers are replaced by others, which a row has wherever it is."""
    rows: jax.Array
    """int `[rows]`: the place of each row in the whole batch."""
    enter: Callable[[jax.Array], jax.Array] | None = None
    """Which rows a loss in a custom step is given."""
    given: list[jax.Array] | None = None
    """Results of `rx.gather`, in order; None for its rows themselves."""
    gathers: bool = True
    """Whether `rx.gather` returns the rows of other parts, too."""
    widens: bool = False
    """Whether floats narrower than float32 are computed in float32."""
    slopes: bool = False
    """Whether what is seen is differentiated, by the derivatives that code defines."""
    inner: bool = False
    """Whether in a loop or a branch."""
    seen: _Values = dataclasses.field(default_factory=dict)
    gathered: list[jax.Array] = dataclasses.field(default_factory=list)
    _numbers: dict[int, int] = dataclasses.field(default_factory=dict)
    _sums: Iterator[int] = dataclasses.field(default_factory=itertools.count)
    _stopped: dict[int, Any] = dataclasses.field(default_factory=dict)
    """Inputs of `stop_gradient`, by the id of its result: values are marked behind one."""

    def __call__(self, jaxpr: ClosedJaxpr, values: Sequence[Any]) -> list[Any]:
        return evaluate_jaxpr(jaxpr, list(map(self._wide, values)), self._apply, self._wide)

    def _wide(self, value: Any) -> Any:
        return wide(value) if self.widens else value

    def _apply(self, eqn: Any, values: list[Any]) -> list[Any]:
        return list(map(self._wide, self._applied(eqn, values)))

    def _applied(self, eqn: Any, values: list[Any]) -> list[Any]:
        name, label = eqn.primitive.name, label_of(eqn)
        if label == SUMMED or name in SUMS_OF_REPLICAS:
            pairs = zip(eqn.outvars, values, strict=True)
            return [self._sum(var) if _is_float(var.aval) else value for var, value in pairs]
        if label == ENTERED and self.enter:
            return [self.enter(values[0])]
        if label == LEFT and self.enter:  # of all rows, whatever the loss was given
            [aval] = (var.aval for var in eqn.outvars)
            return [uniform(self.trial, self._number(eqn), aval.shape).astype(aval.dtype)]
        if label == GATHERED and self.gathers:
            return self._gather(eqn, values)
        if name == "select_n" and not self._depends(eqn.invars[0]):
            return [self._blended(eqn, values[0], values[1:])]
        values = self._changed(eqn, values)
        if name == "scan":
            return self._scan(eqn, values)
        if name == "cond" and not eqn.params.get("branches_platforms"):
            return self._cond(eqn, values)
        if name in STEPPED and not (name in RULED and self.slopes and self._has_rule(eqn)):
            found = self(called(eqn), values)
            if label == DECLARED or label.startswith(SEEN):
                dim = row_dim(called(eqn)) if len(found) > 1 else None
                value = self._stopped.get(id(eqn.invars[0]), found[0])
                self.seen.setdefault(label, []).append((value, dim))
            return found
        if name == "stop_gradient":
            self._stopped[id(eqn.outvars[0])] = values[0]
        if eqn.effects and not eqn.outvars:  # such as jax.debug.print
            return []
        found = wide_eqn(eqn, values) if self.widens else bind_eqn(eqn, values)
        if name in RANDOM | DRAWING and eqn.outvars[0] in self.follow.drawn:
            dim = self.follow.drawn[eqn.outvars[0]]
            found = [jnp.where(self.pinned, self._drawn(eqn, found[0], dim), found[0])]
        return found

    def _has_rule(self, eqn: Any) -> bool:
        """Whether the code's own derivative is needed, or as good as that of what it calls."""
        wide = not any(is_narrow(atom.aval.dtype) for atom in eqn.invars)
        return wide or eqn.primitive.name == "custom_vjp_call"

    def _drawn(self, eqn: Any, found: jax.Array, dim: int) -> jax.Array:
        """Return bits that depend on a row's place in the whole batch; of keys, one for all."""
        if eqn.primitive.name != "random_bits":
            return jnp.take(found, jnp.zeros(found.shape[dim], int), axis=dim)
        size, parts = found.shape[dim], len(self.rows)
        each = 1 if size % parts else size // parts
        known = jnp.arange(size) if size % parts else jnp.repeat(self.rows, each) * each
        places = known + jnp.arange(size) % each
        others = jnp.arange(found.size // size).reshape(*found.shape[:dim], *found.shape[dim + 1 :])
        along = [size if n == dim else 1 for n in range(found.ndim)]
        index = jnp.expand_dims(others, dim) * 0x1F123BB5 + places.reshape(along)
        bits = _hashed(self.trial, self._number(eqn), index)
        if found.dtype.itemsize > 4:
            return bits.astype(found.dtype) << 32 | bits
        return bits.astype(found.dtype)

    def _gather(self, eqn: Any, values: list[jax.Array]) -> list[jax.Array]:
        if self.inner or not len(eqn.outvars) == len(values) == 1:
            raise Undecided("rx.gather in a loop, a branch or a derivative")
        [rows] = values
        self.gathered.append(rows)
        found = rows if self.given is None else self.given[len(self.gathered) - 1]
        if found.shape != eqn.outvars[0].aval.shape:
            raise Undecided("a derivative of rx.gather")
        return [found]

    def _depends(self, atom: Any) -> bool:
        return not isinstance(atom, Literal) and bool(self.follow.places.get(atom))

    def _is_factor(self, atom: Any) -> bool:
        """Whether a value is a condition or a factor that does not depend on rows."""
        place = self.follow.places.get(atom)
        factor = place == NUMBER or (isinstance(place, Origin) and atom.aval.shape == ())
        return factor and (atom.aval.dtype == bool or _is_float(atom.aval))

    def _changed(self, eqn: Any, values: list[Any]) -> list[Any]:
        """Return `values` with numbers replaced that meet rows but do not depend on them."""
        meets = eqn.primitive.name == "broadcast_in_dim" or any(map(self._depends, eqn.invars))
        if not meets:
            return values
        return [
            jnp.where(self.changes, self._replaced(atom), value)
            if not isinstance(atom, Literal) and self._is_factor(atom)
            else value
            for atom, value in zip(eqn.invars, values, strict=True)
        ]

    def _replaced(self, var: Any) -> jax.Array:
        """Return another value, the same one in each evaluation of this trial."""
        found = uniform(self.trial, self._number(var), var.aval.shape)
        share = 0.25 + 0.75 * found  # no share of rows, decay or probability is above 1
        return found < 0.5 if var.aval.dtype == bool else share.astype(var.aval.dtype)

    def _sum(self, var: Any) -> jax.Array:
        """Return another sum over all replicas: the next of them, also if traces are not alike."""
        found = 0.25 + 0.75 * uniform(self.trial, -2 - next(self._sums), var.aval.shape)
        return found.astype(var.aval.dtype)

    def _number(self, of: Any) -> int:
        """Return a number for a variable or an equation, the same in corresponding traces."""
        return self._numbers.setdefault(id(of), len(self._numbers))

    def _within(self) -> "RowEvaluation":
        return dataclasses.replace(self, inner=True, seen={}, gathered=[])

    def _scan(self, eqn: Any, values: list[Any]) -> list[Any]:
        params = eqn.params
        consts, carry, over = of_scan(params, values)
        dims: dict[str, list[int | None]] = {}

        def body(carry: list[Any], each: list[Any]) -> Any:
            run = self._within()
            found = run(params["jaxpr"], [*consts, *carry, *each])
            arrays = {label: [value for value, _ in seen] for label, seen in run.seen.items()}
            dims.update({label: [dim for _, dim in seen] for label, seen in run.seen.items()})
            return found[: len(carry)], (found[len(carry) :], arrays)

        more = {name: params[name] for name in ("length", "reverse")}
        carry, (ys, arrays) = lax.scan(body, carry, over, **more)
        for label, found in arrays.items():
            pairs = zip(found, dims[label], strict=True)
            shifted = [(value, None if dim is None else dim + 1) for value, dim in pairs]
            self.seen.setdefault(label, []).extend(shifted)
        return [*carry, *ys]

    def _cond(self, eqn: Any, values: list[Any]) -> list[Any]:
        """Evaluate all branches, and take one of them, or some of each if no rows choose it."""
        index, branches = values[0], eqn.params["branches"]
        index = jnp.clip(index.astype(jnp.int32), 0, len(branches) - 1)
        found = []
        for branch in branches:
            run = self._within()
            found.append(run(branch, values[1:]))
            for label, seen in run.seen.items():
                self.seen.setdefault(label, []).extend(seen)
        if self._depends(eqn.invars[0]):
            return [lax.select_n(index, *each) for each in zip(*found, strict=True)]
        return [self._blended(eqn, index, each) for each in zip(*found, strict=True)]

    def _blended(self, eqn: Any, which: jax.Array, cases: Sequence[Any]) -> Any:
        """Return one of the `cases`, or with changes a sum of all: none may be overlooked."""
        one = lax.select_n(which, *cases)
        if not _is_float(one):
            return one
        shares = (uniform(self.trial, self._number(eqn), (len(cases),)) + 0.5) / len(cases)
        every = sum(share * case for share, case in zip(shares, cases, strict=True))
        return jnp.where(self.changes & jnp.isfinite(every), every.astype(one.dtype), one)


def is_narrow(dtype: Any) -> bool:
    """Whether a dtype is a float narrower than float32."""
    return bool(jnp.issubdtype(dtype, jnp.floating)) and jnp.finfo(dtype).bits < 32  # type: ignore[no-untyped-call]


def wide(value: Any) -> Any:
    """Return `value`, in float32 if its dtype is narrower."""
    return jnp.asarray(value, jnp.float32) if is_narrow(jnp.result_type(value)) else value


def wide_eqn(eqn: Any, values: list[Any]) -> list[Any]:
    """Evaluate an equation in float32 instead of what is narrower, if it may be."""
    name, params, atoms = eqn.primitive.name, eqn.params, eqn.invars
    if not any(is_narrow(atom.aval.dtype) for atom in (*atoms, *eqn.outvars)):
        return bind_eqn(eqn, values)
    if name == "reduce_precision":
        return values
    if name in ROW_RULES and name not in _OF_BITS:
        dtypes = {each: params.get(each) for each in ("new_dtype", "preferred_element_type")}
        to_wide = {each: np.dtype("float32") for each, to in dtypes.items() if to and is_narrow(to)}
        found = eqn.primitive.bind(*values, **params | to_wide)
        return list(found) if eqn.primitive.multiple_results else [found]
    pairs = zip(atoms, values, strict=True)
    return bind_eqn(
        eqn, [v.astype(a.aval.dtype) if is_narrow(a.aval.dtype) else v for a, v in pairs]
    )


_OF_BITS = {"bitcast_convert_type", "dot_product_attention_bwd_wrapper"}
_OF_BITS |= {"dot_product_attention_fwd_wrapper", "ffi_call", "nextafter"}
"""Primitives that another dtype makes others."""


def _is_float(aval: Any) -> bool:
    return bool(jnp.issubdtype(aval.dtype, jnp.inexact))


def uniform(trial: jax.Array, number: int, shape: tuple[int, ...]) -> jax.Array:
    """Return float32 numbers in [0, 1) for each pair of `trial` and `number`."""
    bits = _hashed(trial, number, jnp.arange(math.prod(shape)))
    found: jax.Array = (bits >> 8).astype(jnp.float32) * (2.0**-24)
    return found.reshape(shape)


def _hashed(trial: jax.Array, number: int, index: jax.Array) -> jax.Array:
    """Return a uint32 for each entry of `index`; unlike `jax.random`, compiled in milliseconds."""
    bits = index.astype(jnp.uint32) * jnp.uint32(0x9E3779B9)
    bits += trial.astype(jnp.uint32) * jnp.uint32(0x85EBCA6B)
    bits += jnp.uint32((number * 0xC2B2AE35 + 1) % (1 << 32))
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        bits = (bits ^ (bits >> shift)) * jnp.uint32(factor)
    found: jax.Array = bits ^ (bits >> 16)
    return found
