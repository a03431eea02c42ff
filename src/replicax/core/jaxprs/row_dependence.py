"""Determine from jaxprs whether each row of a result depends on only one row of a batch.

Unknown primitives count as mixing rows, so independence is never assumed without proof.

The rules in `row_rules` locate rows that are still there. To tell a mean from a sum, or a constant
from the number of rows, a function is traced twice, with different numbers of rows, here 8 and 4.
For rows `h` of shapes `[8, 2]` and `[4, 2]`, which are `Rows(0)`:

    result                      last equation, in both     place            parts of a batch
    jnp.sum(h * h, axis=1)      reduce_sum                 Rows(0)          have the same rows
    jnp.sum(h)                  reduce_sum                 Total(0)         add up
    jnp.mean(h, axis=0)         div _ 8.0     div _ 4.0    Total(-1)        average to it
    h * len(h)                  mul _ 8.0     mul _ 4.0    Rows(0, power=1) differ by a factor
    h / 8                       div _ 8.0     div _ 8.0    Rows(0)          have the same rows
    h - jnp.mean(h, axis=0)     sub                        MIXED            have other rows
    jnp.max(h)                  reduce_max                 MIXED            have other maxima

The literals 8.0 and 4.0 grow with the rows, so they are a `Count(1)`, and a `Total(0)` divided by
it is a `Total(-1)` (`row_counts`). One trace would show the same `div _ 8.0` for a division by the
number of rows and for one by 8.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from replicax.core.jaxprs.jaxpr import CALLS, EXPANDS, REMATS, RULED, called, closed, simple_params
from replicax.core.jaxprs.padding_rules import padded_output, signed
from replicax.core.jaxprs.row_counts import (
    FROM_STEP_KEY,
    GIVEN,
    NUMBER,
    Columns,
    Index,
    Location,
    RowCount,
    Total,
    constant,
    cotangent,
    is_plain,
    quantity,
)
from replicax.core.jaxprs.row_inner import (
    WITH_INNER,
    Unlike,
    derivative,
    is_zero,
    is_zero_at_zero,
    moved,
    moves,
)
from replicax.core.jaxprs.row_labels import DECLARED, KEYED, SEEN, label_of, row_dim
from replicax.core.jaxprs.row_padding import (
    COUNTED,
    FixedNumber,
    Padded,
    allows,
    allows_back,
    as_padded,
    cotangent_of_padded,
    plain_rows,
    tangent,
)
from replicax.core.jaxprs.row_rules import MIXED, Rows
from replicax.errors import LossError

STEPPED = CALLS | REMATS | RULED | {EXPANDS}
"""Primitives that only call a jaxpr."""


class Follow:
    """Follows rows through two traces of a function, made with different numbers of `rows`.

    What differs between the traces depends on the number of rows. `known` holds the places of the
    results of functions, by name, `drawn_for_all` that of random numbers that no row has for
    itself, and `shown` those of variables that are known otherwise. `ruled`: whether derivatives
    that code defines are followed, too. `drawn_first`: whether a draw must have rows in its first
    dim, since its numbers depend on its shape. `pads`: whether rows of the first trace that are
    not in the second are padding, so that places are those of `row_padding`.
    """

    def __init__(
        self,
        rows: tuple[int, int],
        known: Mapping[str, Location] = MappingProxyType({}),
        drawn_for_all: Location = GIVEN,
        shown: Mapping[Any, Rows] = MappingProxyType({}),
        ruled: bool = True,
        drawn_first: bool = False,
        pads: bool = False,
    ) -> None:
        self._drawn_first, self._pads = drawn_first, pads
        self._rows, self._drawn_for_all = rows, drawn_for_all
        self.known = known
        self._shown, self._ruled = shown, ruled
        self.seen: dict[str, list[Location]] = {}
        """Places of the arguments of each function in `SEEN`, by name."""
        self.places: dict[Any, Location] = {}
        """Places of the variables of the first trace."""
        self.declares = self.leaks = False
        """Whether rows are declared independent, and whether, with `pads`, a backward pass that
        code defines may not be 0 where its cotangent is."""
        self.draws = self.draws_alone = False
        """Whether it draws random numbers by the step's key, and by another one."""
        self.mixing: set[str] = set()
        """Names of the primitives that may have mixed rows."""
        self.mixed: dict[Any, int] = {}
        """Dims that grow of variables of the first trace whose rows may have been mixed."""
        self.drawn: dict[Any, int] = {}
        """Dims along which random numbers of the first trace are drawn by row."""

    def __call__(
        self, one: ClosedJaxpr | Jaxpr, two: ClosedJaxpr | Jaxpr, inputs: Sequence[Location]
    ) -> list[Location]:
        """Return the places of the results, given those of the `inputs`; may raise `Unlike`."""
        first, second = closed(one), closed(two)
        known: dict[Any, Location] = {}

        def set_all(variables: Sequence[Any], places: Sequence[Location]) -> None:
            for variable, place in zip(variables, places, strict=True):
                place = self._shown.get(variable, place) if place == MIXED else place
                known[variable] = place
                before = self.places.get(variable, place)
                self.places[variable] = place if before == place else MIXED

        def place_of(atom: Any, twin: Any) -> Location:
            if isinstance(atom, Literal) and isinstance(twin, Literal):
                return self._constant(atom.val, twin.val)
            if isinstance(atom, Literal) or isinstance(twin, Literal):
                raise Unlike
            return known[atom]

        if len(first.jaxpr.eqns) != len(second.jaxpr.eqns):
            raise Unlike
        set_all(first.jaxpr.constvars, list(map(self._constant, first.consts, second.consts)))
        set_all(first.jaxpr.invars, inputs)
        for eqn, twin in zip(first.jaxpr.eqns, second.jaxpr.eqns, strict=True):
            if eqn.primitive is not twin.primitive or len(eqn.invars) != len(twin.invars):
                raise Unlike
            places = list(map(place_of, eqn.invars, twin.invars))
            found = self._outputs(eqn, twin, places)
            # Only the first primitive that mixes is worth naming, not all that read its result.
            if MIXED in found and MIXED not in places:
                self.mixing.add(eqn.primitive.name)
            set_all(eqn.outvars, found)
            pairs: Iterable[tuple[Any, Any]] = zip(eqn.outvars, twin.outvars, strict=True)
            for out, other in pairs:
                grown = _grown(out, other) if known[out] == MIXED else []
                if len(grown) == 1 and out.aval.shape[grown[0]] % self._rows[0] == 0:
                    self.mixed[out] = grown[0]
        return list(map(place_of, first.jaxpr.outvars, second.jaxpr.outvars))

    def _constant(self, one: Any, two: Any) -> Location:
        found = self._same_or_not(one, two)
        if not self._pads:
            return found
        number = found is None and np.ndim(one) == 0 and not _is_key(jnp.result_type(one))
        return FixedNumber(float(one)) if number and np.isrealobj(one) else as_padded(found)

    def _same_or_not(self, one: Any, two: Any) -> Location:
        if one is two:
            return None
        if _is_key(jnp.result_type(one)):
            return MIXED
        if np.array_equal(one, two, equal_nan=_is_float(one)):
            return None
        if np.shape(one) == np.shape(two) == ():
            one, two = np.asarray(one), np.asarray(two)
            return constant(one.item(), two.item(), self._rows)
        arrays = np.asarray(one), np.asarray(two)
        if all(map(np.array_equal, arrays, map(np.arange, self._rows))):
            return Index(0)
        for dim in range(arrays[0].ndim):  # the same for all rows
            first = arrays[0].take([0], dim)
            pairs = zip(arrays, self._rows, strict=True)
            if all(np.array_equal(each, np.repeat(first, rows, dim)) for each, rows in pairs):
                return Rows(dim)
        return MIXED

    def _outputs(self, eqn: Any, twin: Any, places: list[Location]) -> list[Location]:
        name, count = eqn.primitive.name, len(eqn.outvars)
        label = label_of(eqn)
        if label in self.known or name in SUMS_OF_REPLICAS:
            known = self.known.get(label, GIVEN)
            pairs = zip(eqn.outvars, twin.outvars, strict=True)
            found = [
                known if not _grown(*pair) else known or Rows(_grown(*pair)[0]) for pair in pairs
            ]
            return list(map(as_padded, found)) if self._pads else found
        if label == KEYED and not places[0]:
            return [FROM_STEP_KEY]
        if label == DECLARED:
            self.declares = True
            rows = Rows(row_dim(called(eqn)))
            return [as_padded(rows) if self._pads else rows, Total()]
        if name in ("device_put", "optimization_barrier"):
            return places
        if name in WITH_INNER:
            return WITH_INNER[name](self, eqn.params, twin.params, places)
        if name in STEPPED and not (name == EXPANDS and any(map(moves, eqn.outvars))):
            found = self(called(eqn), called(twin), places)
            if name in RULED and self._ruled:
                self._ruled = False
                keeps = self._keeps(eqn, twin, places, found)
                self._ruled = True
                found = found if keeps else [MIXED] * count
            if label.startswith(SEEN):
                self.seen.setdefault(label, []).append(found[-1])
            return found
        if name in DRAWING:
            by_key = FROM_STEP_KEY in places or any(place and place != MIXED for place in places)
            self.draws, self.draws_alone = self.draws or by_key, self.draws_alone or not by_key
        if name == "select_n" and isinstance(places[0], Index) and places[0].negative:
            return [places[1]]
        if COUNTED in places:
            return [COUNTED] * count
        if MIXED in places or simple_params(eqn.params) != simple_params(twin.params):
            return [MIXED] * count
        return list(map(partial(self._output, eqn, places), eqn.outvars, twin.outvars))

    def _keeps(self, eqn: Any, twin: Any, places: list[Location], found: list[Location]) -> bool:
        """Whether a derivative that the user's code defines leaves rows where the values have them.

        That of a parameter is a sum over rows.
        """
        inputs = moved(eqn, places)
        try:
            rules = derivative(eqn, inputs), derivative(twin, inputs)
        except LossError:  # of what a custom step must not differentiate
            return True
        except Exception:  # the user's own refusal, of any type
            return False
        by = [places[n] for n in inputs]
        if self._pads:
            forward = eqn.primitive.name == "custom_jvp_call"
            return self._keeps_padding(forward, rules, places, inputs, found)
        if eqn.primitive.name == "custom_jvp_call":
            same = self(*rules, [*places, *by])
            return all(not one or one == two for one, two in zip(same, found * 2, strict=False))
        derived = self(*rules, [*places, *map(cotangent, found)])
        values, derived = derived[: len(found)], derived[len(found) :]
        matched = zip(derived, map(cotangent, by), strict=True)
        return values == found and all(
            place == want or (not place and is_zero(rules[0], len(found) + n))
            for n, (place, want) in enumerate(matched)
        )

    def _keeps_padding(
        self,
        forward: bool,
        rules: tuple[ClosedJaxpr, ClosedJaxpr],
        places: list[Location],
        inputs: Sequence[int],
        found: list[Location],
    ) -> bool:
        """Whether a derivative that code defines leaves padding out where the values do."""
        by = [places[n] for n in inputs]
        if any(each and not isinstance(each, Padded) for each in found):
            return COUNTED in found
        if forward:
            derived = self(*rules, [*places, *map(tangent, by)])[len(found) :]
            return all(map(allows, derived, found))
        back = [cotangent_of_padded(each) if each else GIVEN for each in found]
        derived = self(*rules, [*places, *back])[len(found) :]
        keeps = all(map(allows_back, derived, by))
        self.leaks |= not (keeps or is_zero_at_zero(rules[0], len(found)))
        return keeps

    def _output(self, eqn: Any, places: list[Location], out: Any, twin: Any) -> Location:
        if not self._pads:
            return self._plain_output(eqn, places, out, twin)
        grown = _grown(out, twin)
        found = padded_output(eqn, places, out.aval, grown, self._rows[0])
        if found is None:
            plain = list(map(plain_rows, places))
            found = MIXED
            if MIXED not in plain:
                found = as_padded(self._plain_output(eqn, plain, out, twin))
            if found is None and any(places):  # numbers of rows that cancel
                found = GIVEN
        if isinstance(found, Padded):
            sizes = [[each.each * rows for each in found.dims] for rows in self._rows]
            own = [[var.aval.shape[each.dim] for each in found.dims] for var in (out, twin)]
            if sizes != own or [each.dim for each in found.dims] != grown:
                return MIXED
        return signed(eqn, places, out.aval, found)

    def _plain_output(self, eqn: Any, places: list[Location], out: Any, twin: Any) -> Location:
        name, shape, rows = eqn.primitive.name, out.aval.shape, self._rows[0]
        grown = _grown(out, twin)
        keyed = FROM_STEP_KEY in places
        if not grown and not any(places):
            holds_key = out.aval.dtype == np.uint32 or _is_key(out.aval.dtype)
            if keyed and name in DRAWING:
                return self._drawn_for_all
            if keyed and holds_key:
                return FROM_STEP_KEY
            if NUMBER in places:
                return NUMBER
            return GIVEN if any(place is not None for place in places) else None
        if len(grown) == 1 and name in RANDOM | DRAWING:
            # Numbers of a row do not depend on later rows, so padding is none to any key's.
            whole = self._drawn_first and "fry" in str(eqn.invars[0].aval.dtype)
            by_row = keyed or whole or any(isinstance(each, Rows) for each in places)
            if keyed or (by_row and name in DRAWING):
                self.drawn[out] = grown[0]
            each, left = divmod(shape[grown[0]], rows)
            of_each_key = len(eqn.invars[0].aval.shape)  # the dims before are those of the keys
            behind = (
                (keyed or whole)
                and name in DRAWING
                and math.prod(shape[of_each_key : grown[0]]) > 1
            )
            apart = by_row and not left and not (behind and self._drawn_first)
            return Rows(grown[0], each) if apart else MIXED
        if grown and not any(place and not isinstance(place, RowCount) for place in places):
            dim, each = grown[0], shape[grown[0]] // rows
            if len(grown) > 1 or shape[dim] % rows or name not in ("broadcast_in_dim", "iota"):
                return MIXED
            if name == "iota" and eqn.params["dimension"] == dim:
                return Index(dim) if each == 1 else MIXED
            return Rows(dim, each, getattr(places[0], "power", 0) if places else 0)
        found = _of(eqn, places, out.aval)
        # The traces check the rule: the dim where it locates the rows must have grown, and only
        # that one, by as much as the number of rows.
        if isinstance(found, Rows) and found != MIXED and self._rows[0] != self._rows[1]:
            sizes = (each.aval.shape[found.dim] for each in (out, twin))
            if [found.each * count for count in self._rows] != list(sizes):
                return MIXED
        if out.aval.dtype != twin.aval.dtype:
            return MIXED
        return found if grown == _dims(found) or self._rows[0] == self._rows[1] else MIXED


def _grown(out: Any, twin: Any) -> list[int]:
    """Return the dims of different sizes, as of the cotangent of rows that are gathered."""
    if len(out.aval.shape) != len(twin.aval.shape):
        raise Unlike
    pairs = enumerate(zip(out.aval.shape, twin.aval.shape, strict=True))
    return [dim for dim, (size, other) in pairs if size != other]


def _dims(place: Location) -> list[int]:
    """Return the dims that grow with the number of rows."""
    return [place.dim] if isinstance(place, Rows | Index | Columns) else []


def _of(eqn: Any, places: list[Location], out: Any) -> Location:
    name, avals = eqn.primitive.name, [atom.aval for atom in eqn.invars]
    rounds = name in ("div", "convert_element_type") and not _is_float_dtype(out.dtype)
    rounds &= name == "div" or _is_float_dtype(avals[0].dtype) or out.dtype == np.bool_
    if rounds and not all(map(is_plain, places)):
        return MIXED
    zero = len(places) > 1 and _is_zero(eqn.invars[1])
    return quantity(name, eqn.params, places, [aval.shape for aval in avals], out.shape, zero)


def _is_key(dtype: Any) -> bool:
    return bool(jnp.issubdtype(dtype, jax.dtypes.extended))


def _is_float_dtype(dtype: Any) -> bool:
    return bool(jnp.issubdtype(dtype, jnp.inexact))


def _is_float(value: Any) -> bool:
    return _is_float_dtype(jnp.result_type(value)) if hasattr(value, "dtype") else False


def _is_zero(atom: Any) -> bool:
    return isinstance(atom, Literal) and not np.shape(atom.val) and bool(atom.val == 0)


SUMS_OF_REPLICAS = {"psum", "psum2", "psum_invariant"}
"""Primitives over the replicas: only of batch statistics, which replicas share."""
RANDOM = {"random_fold_in", "random_split", "random_unwrap", "random_wrap"}
DRAWING = {"random_bits", "random_gamma"}


def follow(jaxpr: ClosedJaxpr | Jaxpr, inputs: Sequence[Location]) -> list[Location]:
    """Return the places of the results of `jaxpr`, given those of its inputs, whatever depends on
    the number of rows.
    """
    return Follow((1, 1))(jaxpr, jaxpr, inputs)
