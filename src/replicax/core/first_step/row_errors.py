"""Errors for losses and steps whose values differ if rows are computed apart, or with padding."""

import dataclasses

from replicax.core.jaxprs.row_causes import (
    BACKWARD,
    DRAWN,
    DRAWN_ALONE,
    ORDER,
    PLACE,
    REDUCED,
    SUMS,
    Cause,
)
from replicax.core.step.loss import LOSS
from replicax.errors import ConfigError, LossError, StateError

_NAMED = 2
"""The most operations that a line names."""
_DECLARE = "or declare it with rx.independent(values) if neither it nor its gradient does"


@dataclasses.dataclass(frozen=True)
class Broken:
    """A value that would differ on parts of a batch, or with padding."""

    name: str
    scalar: bool = False
    """Whether it is one number for the whole batch."""
    merged: bool = False
    """Whether it is a metric that is no mean, whose parts are merged."""
    output: bool = False
    """Whether it is a state or a metric that a custom step returns."""
    by_row: bool = False
    """Whether it is an output with one entry for each row."""
    by_place: bool = False
    """Whether it depends on the number or order of the rows, and not on the others."""
    summed: bool = False
    """Whether it is a sum over rows, or a quotient of such: weights can make a mean of it."""
    causes: tuple[Cause, ...] = ()
    """The operations that mixed the rows, as far as they are known."""
    why: str = ""
    """Why it is not known whether it would; empty if it is."""
    raised: str = ""
    """The error raised if it is computed on one part."""
    pairs: tuple[int, ...] = ()
    """Its shape, if that has the rows twice; else empty."""
    leaks: bool = False
    """Whether padding, whose cotangent is 0, may have a derivative."""

    @property
    def by(self) -> str:
        """The operations, to be inserted into a line."""
        more = " and others" if len(self.causes) > _NAMED else ""
        found = ", ".join(map(str, self.causes[:_NAMED]))
        return f" (in {found}{more})" if found else ""

    @property
    def of_place(self) -> bool:
        """Whether numbers show that it depends on places, and no operation shows more."""
        return self.by_place and not self.only(BACKWARD, REDUCED, SUMS, ORDER)

    @property
    def or_declare(self) -> str:
        """The declaration that may be right, unless rows do meet, though numbers do not tell."""
        meets = self.only(BACKWARD, REDUCED, SUMS)
        return "" if meets else f", {_DECLARE}"

    def only(self, *kinds: str) -> bool:
        """Whether all operations are known, and of these kinds."""
        return bool(self.causes) and all(each.kind in kinds for each in self.causes)


def mixes_rows(broken: Broken, sees: str, fix: str) -> LossError:
    """Return the error for a value that needs all rows where each of `sees` has only some."""
    name = broken.name
    if broken.output and broken.why == "key":
        return LossError(
            f"{name} depends on the step's key, which differs between the {sees}, but replicas "
            "must stay equal: draw in a loss, or keep a key in the state"
        )
    if broken.raised:
        return LossError(
            f"{name} cannot be computed on the rows that each of {sees} sees ({broken.raised}), "
            f"though it can on all of them: accept any number of rows, or {fix}"
        )
    if broken.output:
        means = "take rx.mean of rows, rx.value_and_grad of a loss of them, "
        return LossError(
            f"{name} depends on rows that the step sees{broken.by}, which differ between the "
            f"{sees}, but replicas must stay equal: {'' if broken.only(ORDER) else means}rx.gather "
            "them, or use mode='jit'"
        )
    some = f"each of {sees} sees only some of the rows"
    if broken.scalar:
        return _of_numbers(broken, some, fix)
    what = _of_a_row(broken)
    if broken.only(BACKWARD):
        return LossError(
            f"the gradient of {what} may depend on other rows{broken.by}, and {some}: let the "
            f"backward pass use each row alone, or {fix}"
        )
    if broken.of_place and broken.only(DRAWN_ALONE):
        return LossError(
            f"{what} depends on random numbers from a key of the state, or a constant one, which "
            f"is the same on every replica, and {some}: draw in a loss from the key that it gets, "
            "or for each row by its number, "
            "jax.vmap(partial(jax.random.fold_in, key))(rx.row_numbers(x))"
        )
    if broken.of_place or broken.only(PLACE):
        return LossError(
            f"{what} depends on its position in the batch or on the number of rows{broken.by}, and "
            f"{some}: draw from the step's key and not from one of the state or a constant, number "
            "rows by rx.row_numbers(x), and do not divide by len(x), as the derivative of jnp.mean "
            f"does, and that of jnp.sum does not; or {fix}"
        )
    if broken.why:
        said = f"{some} ({broken.why})"
        return LossError(
            f"{what} may depend on other rows{broken.by}, and {said}: {fix}{broken.or_declare}"
        )
    return LossError(
        f"{what} depends on the other rows{broken.by}, and {some}, which changes it: {fix}"
    )


def _of_numbers(broken: Broken, some: str, fix: str) -> LossError:
    """Return the error for one number that is no mean of those of parts."""
    some += f" ({broken.why})" if broken.why else ""
    if broken.name != LOSS:
        more = "" if broken.summed else f"; or {fix}"
        return LossError(
            f"the metric {broken.name!r} is one number, and not the mean over rows{broken.by}; "
            f"{some}: return its values per row, or compute it from means after the step{more}"
        )
    first = (
        "the loss is one number, and averaging it over equal parts of a batch differs from "
        f"the loss of the whole batch{broken.by}; {some}: "
    )
    if broken.summed:
        return LossError(
            f"{first}return one value per row, as rx.Weighted(values, weights) if they have "
            "different weights"
        )
    weights = "return one value per row, as rx.Weighted(values, weights), or "
    return LossError(f"{first}{weights if broken.only(SUMS) else ''}{fix}")


def nonlinear(cause: Cause) -> LossError:
    """Return the error for a gradient that is divided by a sum of weights afterwards."""
    return LossError(
        f"the backward pass of {cause} is not linear in its cotangent (it clips, normalizes or "
        "returns a new value), and the sum of an rx.Weighted, known after it, divides the "
        "gradient: return values * weights / rx.gather(weights).mean(), which divides before"
    )


def drawn(sees: str) -> LossError:
    """Return the error for gathered rows that depend on random numbers of each replica."""
    return LossError(
        "rows that rx.gather returns depend on random numbers that are drawn once for all rows, "
        f"and each of {sees} draws its own: draw one for each row, or pass them in the batch"
    )


def written(broken: Broken, sees: str) -> LossError:
    """Return the error for model state that a loss computes from the rows it sees."""
    if broken.by_row:
        return LossError(
            f"the loss updates the model's {broken.name} with one entry for each row, and {sees} "
            "see only some of them: use mode='jit' and accumulate=1, or rx.gather the rows"
        )
    return LossError(
        "the loss updates the model's state from the rows it sees, which differ between "
        f"{sees}: use mode='jit', or rx.gather the rows"
    )


def other_rows(held: int | None, given: int) -> StateError:
    """Return the error for a batch of another number of rows than the state has."""
    return StateError(
        f"the state has {held} rows in an rx.ByRow and the batch {given}, padding included; each "
        "row of a batch has its own: use that batch size, where a last batch may be shorter"
    )


def sets_of_rows(what: str) -> ConfigError:
    """Return the error for a batch with sets where a loss is called on the batch."""
    return ConfigError(
        f"{what} was given a batch with an rx.ExtraRows, whose rows a loss cannot sum with "
        "those of the batch: call rx.value_and_grad on each in a custom step, "
        "DataParallel(step=step), and evaluate each set as a batch"
    )


def padded(broken: Broken, padding: int, size: int) -> LossError:
    """Return the error for a value that depends on padded rows."""
    name, where = broken.name, f"{padding} of {size} rows in a batch of this feed are padding"
    if broken.output:
        return LossError(
            f"{name} depends on the rows{broken.by}, and {where}: take rx.mean of them, "
            "exclude padding with rx.row_weights(rows), or choose a batch size that divides the "
            "rows"
        )
    if broken.merged:
        return LossError(
            f"the metric {name!r} counts padded rows, and {where}: give it rx.row_weights(rows) as "
            "its mask or weights, pass its rows as rx.HostMetric(function, rows), which has no "
            "padding, or choose a batch size that divides the rows"
        )
    if broken.scalar:
        return LossError(
            f"{name} is one number per batch{broken.by}, and {where}: return one value per row, "
            "exclude them with rx.row_weights(rows), 0 on padding, or choose a batch size that "
            "divides the rows"
        )
    if broken.raised:
        return LossError(
            f"{name} cannot be computed without padding ({broken.raised}), and {where}: accept any "
            "number of rows, or choose a batch size that divides the rows"
        )
    if broken.only(DRAWN) and broken.why:
        return LossError(
            f"{name} depends on random numbers [..., rows], which are others with another number "
            f"of rows, and {where}: draw them [rows, ...] and transpose, or choose a batch size "
            "that divides the rows"
        )
    if broken.leaks:
        return LossError(
            f"{name} has a backward pass of your own (jax.custom_vjp) that is perhaps not 0 where "
            f"its cotangent is, as that of padding is, and {where}: let it return 0 there, with no "
            "0 / 0, or choose a batch size that divides the rows"
        )
    what = _of_a_row(broken)
    if broken.of_place or broken.only(PLACE):
        return LossError(
            f"{what} depends on the number of rows or on its position{broken.by}, and {where}: "
            "count real rows by rx.row_weights(rows), 0 on padding, number them by "
            "rx.row_numbers(rows), or choose a batch size that divides the rows"
        )
    depends, declare = f"depends on the other rows{broken.by}", ""
    if broken.only(BACKWARD):
        depends = f"has a gradient that may depend on the other rows{broken.by}"
    elif broken.why:
        depends, declare = f"may depend on the other rows{broken.by}", broken.or_declare
        where += f" ({broken.why})"
    return LossError(
        f"{what} {depends}, and {where}: exclude them with rx.row_weights(rows), 0 on padding, or "
        f"choose a batch size that divides the rows{declare}"
    )


def _of_a_row(broken: Broken) -> str:
    name = "the loss" if broken.name == LOSS else broken.name
    if not broken.pairs:
        return f"{name} of a row"
    shape, rows = list(broken.pairs), broken.pairs[0]
    return f"{name} has the shape {shape}, as [{rows}] - [{rows}, 1] has, so {name} of a row"
