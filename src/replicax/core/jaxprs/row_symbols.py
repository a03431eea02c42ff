"""Show that rows which were moved are apart again, by evaluating traces on symbols.

The symbol of an entry is a hash of the expression that computes it from the entries of rows. Equal
symbols mean equal values, and equal derivatives, whatever the numbers are.
"""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr

from replicax.core.ground.quick_compile import quick_options
from replicax.core.jaxprs.jaxpr import (
    RULED,
    bind_eqn,
    called,
    evaluate_jaxpr,
    of_scan,
    simple_params,
    variables,
)
from replicax.core.jaxprs.row_counts import FROM_STEP_KEY, is_plain
from replicax.core.jaxprs.row_dependence import STEPPED, Follow
from replicax.core.jaxprs.row_inner import called_by, derivative, moves
from replicax.core.jaxprs.row_labels import label_of
from replicax.core.jaxprs.row_rules import BY_ENTRY, MIXED, Rows
from replicax.core.jaxprs.symbol_rules import (
    ONCE,
    SYMBOL_RULES,
    Free,
    Given,
    Rule,
    Symbols,
    by_entry,
    hashed,
    is_free,
    of_all,
    symbols_of,
)

_ALL = 2**31
_MOVING = {
    **dict.fromkeys(("broadcast_in_dim", "concatenate", "pad", "reshape", "rev", "slice"), _ALL),
    **dict.fromkeys(("split", "squeeze", "stack", "tile", "transpose", "unstack"), _ALL),
    "dynamic_slice": 1,
    "dynamic_update_slice": 2,
    "gather": 1,
}
"""Primitives that move entries, and how many of their inputs are not indices."""
MOVING = {*_MOVING, "scan"}
"""Primitives after which rows can be apart again."""
_FILL = 2**32 - 1
_KNOWN = BY_ENTRY | {"iota", *_MOVING} - {"gather"}
"""Primitives evaluated on values that are known."""


def shown_apart(
    parts: np.ndarray,
    rows: int,
    traces: tuple[ClosedJaxpr, ClosedJaxpr],
    follows: tuple[Follow, Follow],
) -> dict[Any, Rows]:
    """Return variables of the first trace whose rows are not mixed, though they seem to be.

    The first trace, and its `Follow`, is of a batch of so many `rows`, the other of one of the
    `parts`, int `[parts, rows of one]`.
    """
    whole, part = traces
    places: list[tuple[Any, Rows]] = []
    hidden: set[Any] = set()

    def compared() -> list[jax.Array]:
        together = _Evaluation(follows[0], jnp.arange(rows), hidden=hidden)
        together(whole)

        def alone(mine: jax.Array) -> list[Symbols]:
            run = _Evaluation(follows[1], mine)
            run(part)
            return [symbols for _, _, symbols in run.seen]

        each = lax.map(alone, jnp.asarray(parts))
        equal = []
        if len(each) == len(together.seen):
            for (variable, dim, found), apart in zip(together.seen, each, strict=True):
                places.append((variable, Rows(dim, variable.aval.shape[dim] // rows)))
                by_row = found.reshape(rows, -1)[parts.reshape(-1)]
                equal.append(jnp.array_equal(by_row, apart.reshape(by_row.shape)))
        return equal

    options = quick_options(jax.default_backend())
    equal = jax.device_get(jax.jit(compared, compiler_options=options)())
    apart = dict(places)
    for (variable, _), same in zip(places, equal, strict=True):
        if not same:
            apart.pop(variable, None)
    return {variable: place for variable, place in apart.items() if variable not in hidden}


@dataclasses.dataclass
class _Evaluation:
    """Evaluates a trace on symbols of `rows`, places in the whole batch."""

    follow: Follow
    rows: jax.Array
    seen: list[tuple[Any, int, Symbols]] = dataclasses.field(default_factory=list)
    """Variables that seem to be mixed, the dims of their rows, and their symbols, rows first."""
    hidden: set[Any] = dataclasses.field(default_factory=set)
    """Variables of what is called and not evaluated."""
    derives: bool = False
    """Whether in the rule of a derivative."""
    turn: Any = ONCE
    """A symbol of the iteration of the loops around."""
    visit: int = 0
    _visits: Iterator[int] = dataclasses.field(default_factory=partial(itertools.count, 1))
    _numbers: dict[tuple[int, int], int] = dataclasses.field(default_factory=dict)

    def __call__(self, jaxpr: ClosedJaxpr) -> list[Symbols]:
        return self._inside(jaxpr, [self._given(var) for var in jaxpr.jaxpr.invars])

    def _inside(self, jaxpr: ClosedJaxpr, values: Sequence[Symbols]) -> list[Symbols]:
        """Evaluate a jaxpr that may be called more than once."""
        run = dataclasses.replace(self, visit=next(self._visits))
        return evaluate_jaxpr(jaxpr, values, run._apply, self._constant)

    def _constant(self, value: Any) -> Symbols:
        if jnp.issubdtype(jnp.result_type(value), jax.dtypes.extended):
            value = jax.random.key_data(value)  # to be distinguished, not to be drawn from
        return np.asarray(value)

    def _number(self, of: Any) -> int:
        """Return a number for a variable, the same in corresponding traces."""
        return self._numbers.setdefault((self.visit, id(of)), len(self._numbers))

    def _given(self, var: Any, drawn: bool = False) -> Given | None:
        """Return the symbols of a variable whose rows are apart, or that depends on none.

        `drawn`: whether these are random numbers, which are as good for any other row.
        """
        place, shape = self.follow.places.get(var, MIXED), var.aval.shape
        if not is_plain(place) or place == MIXED:
            return None
        found = Given(self._number(var), shape, turn=self.turn)
        if not isinstance(place, Rows):
            return found
        rows = None if drawn else self.rows
        return dataclasses.replace(found, rows=rows, dim=place.dim, each=place.each, drawn=drawn)

    def _apply(self, eqn: Any, values: list[Symbols]) -> list[Symbols]:
        keys = any(self.follow.places.get(atom) == FROM_STEP_KEY for atom in variables(eqn.invars))
        given = [self._given(var, keys and var in self.follow.drawn) for var in eqn.outvars]
        # Constants and random numbers are as good for any other row: they get no symbols of theirs.
        free = label_of(eqn) not in self.follow.known and all(map(is_free, values))
        if free:
            given = [each if each and each.rows is None else None for each in given]
        if all(each is not None for each in given):
            self._hide(eqn)
            return given
        found = self._found(eqn, values)
        pairs = zip(eqn.outvars, given, found, strict=True)
        found = [new if known is None else known for _, known, new in pairs]
        if free:
            found = [
                each if isinstance(each, np.ndarray) else Free(symbols_of(each)) for each in found
            ]
        for var, value in zip(eqn.outvars, found, strict=True):
            if var in self.follow.mixed:
                dim = self.follow.mixed[var]
                self.seen.append((var, dim, jnp.moveaxis(symbols_of(value), dim, 0)))
        return found

    def _found(self, eqn: Any, values: list[Symbols]) -> list[Symbols]:
        name, params = eqn.primitive.name, eqn.params
        if name == "custom_jvp_call" and not self.derives:
            return self._ruled(eqn, list(map(symbols_of, values)))
        if name in STEPPED - {"custom_vjp_call"} and label_of(eqn) not in self.follow.known:
            return self._inside(called(eqn), values)
        if name == "optimization_barrier":
            return values
        if name in _KNOWN and all(isinstance(each, np.ndarray) for each in values):
            with jax.ensure_compile_time_eval():
                return [np.asarray(each) for each in bind_eqn(eqn, values)]
        indices = values[_MOVING.get(name, 0) :]
        if name in _MOVING and all(isinstance(each, np.ndarray) for each in indices):
            params = {**params, **({"fill_value": _FILL} if name == "gather" else {})}
            data = map(symbols_of, values[: _MOVING[name]])
            moved: Any = eqn.primitive.bind(*data, *indices, **params)
            return list(moved) if eqn.primitive.multiple_results else [moved]
        values = list(map(symbols_of, values))
        if name not in ("scan", "cond"):
            self._hide(eqn)
        if name == "custom_vjp_call":  # a backward pass that may not be linear in what it is given
            values = [*values, hashed("rows", self.rows)]
        if name == "scan":
            return self._scan(eqn, values)
        shapes = [var.aval.shape for var in eqn.outvars]
        tag = f"{name} {simple_params(params)}"
        if name == "cond":
            branches = (self._inside(branch, values[1:]) for branch in params["branches"])
            pairs = zip(shapes, zip(*branches, strict=True), strict=True)
            return [by_entry(tag, [values[0], *map(symbols_of, each)], to) for to, each in pairs]
        if name in BY_ENTRY:
            return [by_entry(tag, values, shapes[0])]
        rule: Rule = SYMBOL_RULES.get(name, of_all)
        return rule(params, tag, values, shapes)

    def _hide(self, eqn: Any, ruled: bool = True) -> None:
        """Note the variables of all that an equation calls; `ruled` as for `Follow`."""
        for inner in called_by(eqn, ruled):
            for each in inner.eqns:
                self.hidden.update(each.outvars)
                self._hide(each, ruled and eqn.primitive.name not in RULED)

    def _ruled(self, eqn: Any, values: list[Symbols]) -> list[Symbols]:
        """Return symbols of results, and of their derivatives."""
        found = list(map(symbols_of, self._inside(called(eqn), values)))
        rule = derivative(eqn)
        moved = [hashed("derivative", each) for each in values]
        own = [each for each, atom in zip(moved, eqn.invars, strict=True) if moves(atom)]
        ruled = dataclasses.replace(self, derives=True)._inside(rule, [*values, *own])
        of = list(map(symbols_of, ruled))
        pairs = zip(found, of[: len(found)], of[len(found) :], strict=True)
        return [
            hashed("with", each, same, *([slope] if slope.shape == each.shape else []))
            for each, same, slope in pairs
        ]

    def _scan(self, eqn: Any, values: list[Symbols]) -> list[Symbols]:
        consts, carry, over = of_scan(eqn.params, values)
        marks: list[tuple[Any, int]] = []

        def body(carry: list[Any], of: tuple[jax.Array, list[Any]]) -> Any:
            number, each = of
            run = dataclasses.replace(self, seen=[], turn=hashed("turn", self.turn, number))
            inner = run._inside(eqn.params["jaxpr"], [*consts, *carry, *each])
            found = list(map(symbols_of, inner))
            marks[:] = [(var, dim) for var, dim, _ in run.seen]
            return found[: len(carry)], (found[len(carry) :], [each for *_, each in run.seen])

        length, reverse = eqn.params["length"], eqn.params["reverse"]
        xs = jnp.arange(length), over
        carry, (ys, arrays) = lax.scan(body, carry, xs, length, reverse=reverse)
        for (var, dim), array in zip(marks, arrays, strict=True):
            self.seen.append((var, dim, jnp.moveaxis(array, 1, 0)))
        return [*carry, *ys]
