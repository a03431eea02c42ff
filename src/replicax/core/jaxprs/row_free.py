"""Find which arrays of a state, handed from one part of a batch to the next, are free of rows."""

from collections.abc import Callable, Sequence
from typing import Any

from jax.extend.core import ClosedJaxpr
from jax.interpreters.partial_eval import dce_jaxpr

from replicax.core.jaxprs.row_counts import GIVEN
from replicax.core.jaxprs.row_dependence import Follow
from replicax.core.jaxprs.row_inner import Unlike


def free_of_rows(
    one: ClosedJaxpr, count: int, rows: int, other: Callable[[], ClosedJaxpr]
) -> list[bool]:
    """Return which of `count` arrays change, and depend neither on rows nor on their number.

    The arrays are the first inputs of a function and, as they are after it, its last results; its
    last inputs, `rows` of them, have rows. `one` and `other()` are its traces with different
    numbers of rows. An array that depends on one that depends on rows does so, too.
    """
    inputs: list[Any] = one.jaxpr.invars
    results: list[Any] = one.jaxpr.outvars
    first = len(results) - count
    changed = [n for n in range(count) if results[first + n] is not inputs[n]]
    reads = {n: _only(one, [first + n])[1] for n in changed}

    def but_for(by_row: set[int]) -> list[int]:
        while more := {n for n in changed if any(reads[n][each] for each in by_row)} - by_row:
            by_row = by_row | more
        return [n for n in changed if n not in by_row]

    free = but_for({n for n in changed if any(reads[n][len(inputs) - rows :])})
    if free:
        numbered = _numbered(one, other, [first + n for n in free])
        held = {n for n, is_numbered in zip(free, numbered, strict=True) if is_numbered}
        free = but_for(set(changed).difference(free) | held)
    return [n in free for n in range(count)]


def _numbered(
    one: ClosedJaxpr, other: Callable[[], ClosedJaxpr], wanted: Sequence[int]
) -> list[bool]:
    """Return which of the `wanted` results, which read no rows, may depend on their number."""
    try:
        (kept, used), (kept_by_twin, used_by_twin) = (
            _only(each, wanted) for each in (one, other())
        )
        if used != used_by_twin:
            raise Unlike
        return list(map(bool, Follow((1, 2))(kept, kept_by_twin, [GIVEN] * sum(used))))
    except Exception:  # the user's code, on another number of rows, or traces that are unlike
        return [True] * len(wanted)


def _only(whole: ClosedJaxpr, wanted: Sequence[int]) -> tuple[ClosedJaxpr, list[bool]]:
    """Return the trace of the `wanted` results alone, and which inputs it reads."""
    results: Any = whole.jaxpr.outvars
    jaxpr, used = dce_jaxpr(whole.jaxpr, [n in wanted for n in range(len(results))])
    return ClosedJaxpr(jaxpr, whole.consts), used
