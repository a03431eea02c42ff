"""Errors for losses and steps whose values differ if rows are computed apart, or with padding."""

import dataclasses

from replicax.core.step.loss import LOSS
from replicax.errors import ConfigError, LossError, StateError

_DECLARE = "or declare it with rx.independent(values) if it does not"


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
    why: str = ""
    """Why it is not known whether it would; empty if it is."""
    raised: str = ""
    """The error raised if it is computed on one part."""
    drawn: bool = False
    """Whether that may be as random numbers are drawn with rows in another dim than the first."""
    pairs: tuple[int, ...] = ()
    """Its shape, if that has the rows twice; else empty."""


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
        return LossError(
            f"{name} depends on rows that the step sees, which differ between the {sees}, but "
            "replicas must stay equal: take rx.mean of rows, rx.value_and_grad of a loss of them, "
            "rx.gather them, or use mode='jit'"
        )
    some = f"each of {sees} sees only some of the rows"
    if broken.why:
        some += f" ({broken.why})"
    if broken.scalar and name == LOSS:
        return LossError(
            "the loss is one number, and averaging it over equal parts of a batch differs from "
            f"the loss of the whole batch; {some}: return one value per row, as "
            "rx.Weighted(values, weights) if they have different weights"
        )
    if broken.scalar:
        return LossError(
            f"the metric {name!r} is one number, and not the mean over rows; {some}: return its "
            "values per row, or compute it from means after the step"
        )
    what = _of_a_row(broken)
    if broken.why:
        return LossError(f"{what} may depend on other rows, and {some}: {fix}, {_DECLARE}")
    if broken.by_place:
        return LossError(
            f"{what} depends on its position in the batch or on the number of rows, and {some}: "
            "draw from the step's key and not from a constant one, pass row numbers in the batch, "
            f"and do not divide by len(x); or {fix}"
        )
    return LossError(f"{what} depends on the other rows, and {some}, which changes it: {fix}")


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
        f"the state has {held} rows in an rx.PerRow and the batch {given}, padding included; each "
        "row of a batch has its own: use that batch size, where a last batch may be shorter"
    )


def sets_of_rows(what: str) -> ConfigError:
    """Return the error for a batch with sets where a loss is called on the batch."""
    return ConfigError(
        f"{what} was given a batch with an rx.RowSet, whose rows a loss cannot sum with those of "
        "the batch: call rx.value_and_grad on each in a custom step, DataParallel(step=step), and "
        "evaluate each set as a batch"
    )


def padded(broken: Broken, padding: int, size: int) -> LossError:
    """Return the error for a value that depends on padded rows."""
    name, where = broken.name, f"{padding} of {size} rows in a batch of this feed are padding"
    if broken.output:
        return LossError(
            f"{name} depends on the rows, and {where}: take rx.mean of them, "
            "exclude padding with rx.row_weights(rows), or choose a batch size that divides the "
            "rows"
        )
    if broken.merged:
        return LossError(
            f"the metric {name!r} counts padded rows, and {where}: give it rx.row_weights(rows) as "
            "its mask or weights, pass its rows as rx.AllRows(function, rows), which has no "
            "padding, or choose a batch size that divides the rows"
        )
    if broken.scalar:
        return LossError(
            f"{name} is one number per batch, and {where}, which it cannot exclude: return one "
            "value per row, or choose a batch size that divides the rows"
        )
    if broken.raised:
        return LossError(
            f"{name} cannot be computed without padding ({broken.raised}), and {where}: accept any "
            "number of rows, or choose a batch size that divides the rows"
        )
    if broken.drawn:
        return LossError(
            f"{name} depends on random numbers [..., rows], which are others with another number "
            f"of rows, and {where}: draw them [rows, ...] and transpose, or choose a batch size "
            "that divides the rows"
        )
    what = _of_a_row(broken)
    depends, declare = "depends on the other rows", ""
    if broken.why:
        depends, declare = f"may depend on the other rows ({broken.why})", f", {_DECLARE}"
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
