"""Places in the trace of a padded batch: what padded rows hold, and whether it counts.

In a batch of which only some rows are real, two traces are compared: with all rows, and with the
real ones alone. A value is right if it is the same in both, and an array `[rows, ...]` if its real
rows are. For weights `real` of shape `[8]`, 0 on padding, rows `x` of shape `[8]`, and `c` known:

    x                           Padded, nothing known of padding
    real                        padding holds 0
    x * real                    padding holds 0, which absorbs whatever it was
    jnp.where(real > 0, x, c)   padding holds c
    jnp.exp(where of -inf)      padding holds 0
    jnp.sum of 0 on padding     the sum over the real rows: the same in both traces
    jnp.max of -inf             the same; so for the minimum of +inf, any of False, all of True
    jnp.max of 0                COUNTED, unless no entry is negative
    jnp.max, nothing known      MIXED

What is the same in both traces has the same derivative in both, too: that by padded rows is 0 where
they hold a known number, and where a derivative there is infinite the result is `MIXED`.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from replicax.core.jaxprs.row_rules import MIXED, Rows


class Along(NamedTuple):
    """Rows along a dim, `each` entries for one, and what padded ones hold, if it is known."""

    dim: int
    each: int
    value: float | None = None


@dataclasses.dataclass(frozen=True)
class Padded:
    """An array whose entries of real rows do not depend on padding, along one dim or several."""

    dims: tuple[Along, ...]
    power: float = 0
    """The entries are multiplied by the number of rows to this power."""
    positive: bool = False
    """Whether no entry is negative."""
    fixed: bool = False
    """Whether it is computed from weights and constants alone, so that it has no derivative."""

    def along(self, dim: int) -> Along | None:
        """Return its rows along `dim`, if any."""
        return next((each for each in self.dims if each.dim == dim), None)


@dataclasses.dataclass(frozen=True)
class FixedNumber:
    """A constant, the same in all entries."""

    value: float

    def __bool__(self) -> bool:
        return False


COUNTED = Rows(-2)
"""Padding holds a known number that changes the value."""
WEIGHTS = Padded((Along(0, 1, 0.0),), positive=True, fixed=True)
"""The place of `rx.row_weights`."""


def as_padded(place: Any) -> Any:
    """Return plain rows as rows of which some are padding, with nothing known of these."""
    if not isinstance(place, Rows) or place in (MIXED, COUNTED):
        return place
    return Padded((Along(place.dim, place.each),), place.power)


def plain_rows(place: Any) -> Any:
    """Return a place without what is known of padding, as `row_counts` takes it."""
    if isinstance(place, FixedNumber):
        return None
    if not isinstance(place, Padded):
        return place
    if len(place.dims) > 1:
        return MIXED
    [along] = place.dims
    return Rows(along.dim, along.each, place.power)


def joined_padding(places: Sequence[Any]) -> Any:
    """Return the place of a choice between arrays of the same shape, some of them `Padded`."""
    first = places[0]
    if COUNTED in places:
        return COUNTED
    alike = all(isinstance(each, Padded) and _shape(each) == _shape(first) for each in places)
    if not alike:
        return MIXED
    return Padded(
        tuple(_joined(each) for each in zip(*(place.dims for place in places), strict=True)),
        first.power,
        all(place.positive for place in places),
        all(place.fixed for place in places),
    )


def _shape(place: Padded) -> tuple[Any, ...]:
    return *(each[:2] for each in place.dims), place.power


def _joined(along: Sequence[Along]) -> Along:
    return along[0] if len(set(along)) == 1 else along[0]._replace(value=None)


def same_rows(one: Any, other: Any) -> bool:
    """Whether both have rows along the same dims."""
    return isinstance(one, Padded) and isinstance(other, Padded) and _shape(one) == _shape(other)


def shifted(place: Any, by: int) -> Any:
    """Return the place of an array with dims before those of `place`, or with fewer of them."""
    if isinstance(place, Padded):
        dims = tuple(each._replace(dim=each.dim + by) for each in place.dims)
        return dataclasses.replace(place, dims=dims) if dims[0].dim >= 0 else MIXED
    if not isinstance(place, Rows):
        return place
    found = dataclasses.replace(place, dim=place.dim + by)
    return place if place.dim < 0 else found if found.dim >= 0 else MIXED


def tangent(place: Any) -> Any:
    """Return the place of a derivative of a value in `place`: 0 where padding holds a number."""
    if not isinstance(place, Padded):
        return place
    dims = tuple(each._replace(value=0.0 if _finite(each) else None) for each in place.dims)
    return dataclasses.replace(place, dims=dims, positive=False, fixed=False)


def cotangent_of_padded(place: Any) -> Padded:
    """Return the place of a loss's derivative by `place`: 0 for padding that does not matter.

    By padding that holds a number it may be anything, since no derivative goes further. It is
    `fixed`: a backward pass is not differentiated.
    """
    known = any(map(_finite, place.dims))
    dims = tuple(each._replace(value=None if known else 0.0) for each in place.dims)
    return Padded(dims, -place.power, fixed=True)


def allows(found: Any, value: Any) -> bool:
    """Whether `found` is as a derivative of `value`, forward, must be."""
    if not isinstance(value, Padded):
        return not found
    same = same_rows(found, value)
    pairs = zip(found.dims, value.dims, strict=True) if same else ()
    return same and all(one.value == 0 or not _finite(other) for one, other in pairs)


def allows_back(found: Any, value: Any) -> bool:
    """Whether `found` is as a derivative by `value`, backward, must be."""
    if not isinstance(value, Padded):
        return not found
    pairs = zip(found.dims, value.dims, strict=True) if isinstance(found, Padded) else ()
    same = same_rows(found, dataclasses.replace(value, power=-value.power))
    return same and all(one.value == 0 or _finite(other) for one, other in pairs)


def _finite(along: Along) -> bool:
    return along.value is not None and math.isfinite(along.value)
