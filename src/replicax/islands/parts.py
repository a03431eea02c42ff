"""Which island computes which parts of a batch, and the tree that adds them."""

import itertools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from replicax.core.ground.job import Value
from replicax.islands.messages import View

Block = tuple[int, int]
"""First part, and number of parts: a subtree of the tree over all parts."""


def dealt(parts: Sequence[int], islands: int) -> list[Sequence[int]]:
    """Return consecutive spans of `parts`, one for each island, as equal as possible."""
    ends = [len(parts) * n // islands for n in range(islands + 1)]
    return [parts[start:end] for start, end in itertools.pairwise(ends)]


def assigned(view: View, exchange: int, count: int) -> dict[int, set[int]]:
    """Return the parts that each member computes for an exchange of `count` parts.

    In the first exchange of a view, members keep what they had computed before, and only the parts
    of those that left are dealt.
    """
    members = [index for index, _ in view.members]
    kept: list[set[int]] = [set() for _ in members]
    if exchange == view.exchange and view.kept:
        kept_so_far: set[int] = set()
        for keeps, parts in zip(kept, view.kept, strict=True):
            keeps |= {part for part in parts if part < count} - kept_so_far
            kept_so_far |= keeps
    missing = [part for part in range(count) if not any(part in keeps for keeps in kept)]
    spans = dealt(missing, len(members))
    return {m: keeps | set(span) for m, keeps, span in zip(members, kept, spans, strict=True)}


def blocks_of(parts: Collection[int], count: int) -> list[Block]:
    """Return the maximal subtrees, of a binary tree over `count` parts, that `parts` consists of.

    Examples:
        >>> blocks_of({2, 3, 4, 5, 6}, 8)
        [(2, 2), (4, 2), (6, 1)]
    """

    def of(first: int, size: int) -> list[Block]:
        if all(part in parts for part in range(first, first + size)):
            return [(first, size)]
        if size == 1:
            return []
        return of(first, size // 2) + of(first + size // 2, size // 2)

    return of(0, count) if parts else []


def added(
    block: Block, known: Mapping[Block, Value], add: Callable[[Value, Value], Value]
) -> Value:
    """Return the sum of `block` from sums of subtrees of it."""
    if block in known:
        return known[block]
    first, size = block
    if size == 1:
        raise KeyError(f"part {first} is missing")
    half = size // 2
    return add(added((first, half), known, add), added((first + half, half), known, add))


def within(block: Block, parts: Collection[int]) -> bool:
    """Whether all parts of `block` are in `parts`."""
    return all(part in parts for part in range(block[0], sum(block)))


def covered(blocks: Iterable[Block]) -> set[int]:
    """Return all parts in `blocks`."""
    return {part for first, size in blocks for part in range(first, first + size)}
