"""Cut the trace of a step into programs, with cross-micro-shard operations between them.

A value is either shared (equal on all devices) or own (per micro-shard, as it depends on rows). The
trace is cut into levels at the collectives, where micro-shards exchange data. Each level has a
shared program, run once; an own program, run per micro-shard; and then the collectives. The cut
does not depend on the number of devices.

For example, a step on the weight `w` (shared) and two rows `x` (own), where `total` is `sum_all`:

    def step(w, x):
        each = x * jnp.tanh(w)
        return w * 0.9 - total(each.sum())

    equation                       kind      level   segment
    c = tanh w                     shared    0       0: only `d` reads it, which is own
    d = mul x c                    own       0       0
    e = mul w 0.9                  shared    1       1: nothing before level 1 reads it
    f = reduce_sum d               own       0       0
    g = of_micro_shard f           own       0       0
    h = sum_of_micro_shards g      shared    0       none: it ends level 0
    i = sub e h                    shared    1       1

    items[0]  Segment(own=True)    w, x -> g    tanh, mul, reduce_sum, of_micro_shard; sums (h,)
    items[1]  Segment(own=False)   w, h -> i    mul, sub

After item 0, `x` is not needed any more; after item 1, neither `w` nor `h`.

If the step also returned `jnp.tanh(w) * (n + 1)` for an int32 scalar `n`, and multiplied `each` by
`n + 1`, `c` would have a reader at level 1 too. There would be three segments: a shared one of
level 0, `w -> c`; the own one, which takes `c` as an argument; and that of level 1. `n + 1` would
be part of the last two, each of which takes `n` and adds 1 by itself.
"""

import collections
import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Var
from jax.interpreters.partial_eval import dce_jaxpr

from replicax.core.jaxprs.jaxpr import evaluate_jaxpr, inlined, variables
from replicax.core.modes.exact.micro_shard_primitives import (
    calls_collective,
    gather_p,
    meets,
    own_of,
    sum_p,
)
from replicax.core.placement.mesh import ShardDim

_FEW = 64
"""Maximum size of integer or key arrays that programs recompute instead of passing them on."""


@dataclasses.dataclass(frozen=True)
class Segment:
    """Equations between two collectives, compiled as one program."""

    jaxpr: Jaxpr
    own: bool
    """Whether it runs once per micro-shard."""
    sums: tuple[JaxprEqn, ...] = ()
    """Sums over all micro-shards of results that are not used elsewhere."""


@dataclasses.dataclass(frozen=True)
class Exchange:
    """Other equations that combine micro-shards: gathered rows, or a loop around sums."""

    eqns: tuple[JaxprEqn, ...]


Item = Segment | Exchange
_Place = tuple[int, bool]


@dataclasses.dataclass(frozen=True)
class Cut:
    """A jaxpr cut into items."""

    jaxpr: Jaxpr
    """Jaxpr with calls around collectives inlined; its constants are its first arguments."""
    consts: tuple[Any, ...]
    items: tuple[Item, ...]
    """Segments and collectives in execution order."""
    shard_dims: dict[Var, ShardDim]
    """Placement of each own value passed between items."""
    unneeded: tuple[tuple[Var, ...], ...]
    """For each item, the values not read after it."""


def split_trace(closed: ClosedJaxpr, into: Sequence[ShardDim], out: Sequence[ShardDim]) -> Cut:
    """Cut the jaxpr of one micro-shard where micro-shards meet.

    `into` gives the placement of its arguments, `out` that of its own results.
    """
    closed = inlined(closed, calls_collective)
    jaxpr, consts = closed.jaxpr, tuple(closed.consts)
    jaxpr = jaxpr.replace(invars=[*jaxpr.constvars, *jaxpr.invars], constvars=[])
    jaxpr, _ = dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars), instantiate=True)
    given = zip(jaxpr.invars[len(consts) :], into, strict=True)
    shard_dims: dict[Var, ShardDim] = {var: how for var, how in given if how is not None}
    owned, of_own = set(shard_dims), []

    def own_results(eqn: JaxprEqn, operands: list[bool]) -> list[bool]:
        found = own_of(eqn, operands)
        owned.update(var for var, each in zip(eqn.outvars, found, strict=True) if each)
        of_own.append(any(found) or (not found and any(operands)))
        if eqn.primitive is sum_p:
            dims = zip(eqn.outvars, eqn.params["shard_dims"], strict=True)
            shard_dims.update({var: dim for var, dim in dims if dim is not None})
        return found

    evaluate_jaxpr(jaxpr, [var in owned for var in jaxpr.invars], own_results, lambda _: False)
    for atom, how in zip(jaxpr.outvars, out, strict=True):
        if isinstance(atom, Var) and atom in owned and how is not None:
            shard_dims.setdefault(atom, how)
    for var in owned:
        shard_dims.setdefault(var, 0)
    items = tuple(_items(jaxpr, of_own))
    seen, unneeded = set(variables(jaxpr.outvars)), []
    for item in reversed(items):
        read = dict.fromkeys(variables(inputs_of(item)))
        unneeded.append(tuple(var for var in read if var not in seen))
        seen |= set(read)
    return Cut(jaxpr, consts, items, shard_dims, tuple(unneeded[::-1]))


def inputs_of(item: Item) -> list[Any]:
    """Return the inputs of an item."""
    if isinstance(item, Segment):
        return list(item.jaxpr.invars)
    return [atom for eqn in item.eqns for atom in eqn.invars]


def _items(jaxpr: Jaxpr, of_own: Sequence[bool]) -> Iterator[Item]:
    """Yield segments and collectives, level by level."""
    levels, last = _levels(jaxpr)
    few = _few(jaxpr)
    # `handed` are the values that leave the segment that computes them. Until the segments are
    # known, these are the operands of collectives and the results of the step.
    read = [var for eqn in jaxpr.eqns if meets(eqn) for var in variables(eqn.invars)]
    handed = {*read, *variables(jaxpr.outvars)}
    members: dict[_Place, list[int]] = collections.defaultdict(list)
    for number, place in enumerate(_places(jaxpr, levels, of_own)):
        # Small integers belong to no segment: each that reads one recomputes it. A collective, and
        # the result of the step, cannot.
        again = number in few and not handed & set(jaxpr.eqns[number].outvars)
        if not again and not meets(jaxpr.eqns[number]):
            members[place].append(number)
    chosen = {place: _with_few(jaxpr, numbers, few) for place, numbers in members.items()}
    for numbers in chosen.values():
        made = {var for number in numbers for var in jaxpr.eqns[number].outvars}
        handed |= {
            var for n in numbers for var in variables(jaxpr.eqns[n].invars) if var not in made
        }
    for level in range(last + 1):
        here = [e for n, e in zip(levels, jaxpr.eqns, strict=True) if n == level and meets(e)]
        sums = tuple(eqn for eqn in here if eqn.primitive is sum_p)
        gathers = tuple(eqn for eqn in here if eqn.primitive is gather_p)
        for own in (False, True):
            # First the shared segment, as the own one of its level may read its values, and not the
            # other way around: what is computed from own values is own, up to the next collective.
            if (level, own) in chosen:
                numbers = chosen[level, own]
                part = _part(jaxpr, numbers, set(members[level, own]), handed)
                # The sums go with the program that computes their operands, so that the host can
                # add those of one micro-shard before it computes the next.
                yield Segment(part, own, sums if own else ())
        if gathers:
            yield Exchange(gathers)
        yield from (Exchange((eqn,)) for eqn in here if eqn not in (*sums, *gathers))


def _places(jaxpr: Jaxpr, levels: Sequence[int], of_own: Sequence[bool]) -> list[_Place]:
    """Return the level of each equation and whether it is computed per micro-shard.

    A shared value read only by own equations of its level is computed per micro-shard with them:
    it need not be written to memory by one program and read by another.
    """
    readers: dict[Var, set[Any]] = collections.defaultdict(set)
    for var in variables(jaxpr.outvars):
        readers[var].add(None)
    places: list[_Place] = list(zip(levels, of_own, strict=True))
    # In reverse, so that the places of all readers are final: in a chain of shared equations the
    # last one goes along first, and then the one before has only own readers, too. A reader that is
    # the step's result or a collective counts as None, which keeps an equation where it is.
    for number, eqn in reversed(list(enumerate(jaxpr.eqns))):
        found = set().union(*(readers[var] for var in eqn.outvars))
        if found == {(levels[number], True)} and not meets(eqn):
            places[number] = levels[number], True
        for var in variables(eqn.invars):
            readers[var].add(None if meets(eqn) else places[number])
    return places


def _levels(jaxpr: Jaxpr) -> tuple[list[int], int]:
    """Return each equation's level, the number of collectives before it, and the last level.

    Collectives are placed as early as possible, other equations as late as possible, near their
    uses. Early collectives make few levels, and those that do not depend on one another share one.
    A late equation is part of the program that reads its result, which then need not be kept.
    """
    # Forwards: the earliest level of each value, which is final for collectives.
    level: dict[Any, int] = collections.defaultdict(int)
    levels = []
    for eqn in jaxpr.eqns:
        levels.append(max((level[var] for var in variables(eqn.invars)), default=0))
        level.update(dict.fromkeys(eqn.outvars, levels[-1] + meets(eqn)))
    last = max(level.values(), default=0)
    # Backwards: move every other equation to the first level that needs one of its results. An
    # equation with effects stays, since its effect is not among the results.
    needed: dict[Any, int] = dict.fromkeys(variables(jaxpr.outvars), last)
    for number, eqn in reversed(list(enumerate(jaxpr.eqns))):
        if not meets(eqn) and not eqn.effects:
            levels[number] = min((needed.get(var, last) for var in eqn.outvars), default=last)
        for var in variables(eqn.invars):
            needed[var] = min(needed.get(var, last), levels[number])
    return levels, last


def _few(jaxpr: Jaxpr) -> set[int]:
    """Return the numbers of equations computing small integer or key arrays from only such.

    Counters, indices and keys are the same bits wherever they are computed, and cheap. Floats are
    not among them: another program may fuse them with other operations, and round differently.
    """
    known = {var for var in jaxpr.invars if _is_few(var.aval)}
    found = set()
    for number, eqn in enumerate(jaxpr.eqns):
        from_few = all(var in known for var in variables(eqn.invars))
        few = from_few and all(_is_few(var.aval) for var in eqn.outvars)
        if few and not eqn.effects and not meets(eqn):
            known |= set(eqn.outvars)
            found.add(number)
    return found


def _is_few(aval: Any) -> bool:
    exact = not jnp.issubdtype(aval.dtype, jnp.inexact)
    return exact and math.prod(aval.shape) <= _FEW


def _with_few(jaxpr: Jaxpr, numbers: Sequence[int], few: set[int]) -> list[int]:
    """Return `numbers` of equations plus those of the small integers they need, in order."""
    # In reverse, as a small integer may need others, which are computed before it.
    wanted: set[Any] = set()
    found = set(numbers)
    for number in reversed(range(len(jaxpr.eqns))):
        eqn = jaxpr.eqns[number]
        if number in found or (number in few and wanted & set(eqn.outvars)):
            found.add(number)
            wanted |= set(variables(eqn.invars))
    return sorted(found)


def _part(jaxpr: Jaxpr, numbers: Sequence[int], members: set[int], handed: set[Var]) -> Jaxpr:
    """Return a jaxpr of equations `numbers`; `members` among them return values used elsewhere."""
    # A recomputed small integer is no member: whoever else reads it recomputes it as well.
    eqns = [jaxpr.eqns[number] for number in numbers]
    made = {var for eqn in eqns for var in eqn.outvars}
    read = dict.fromkeys(var for eqn in eqns for var in variables(eqn.invars) if var not in made)
    own = (var for number in numbers if number in members for var in jaxpr.eqns[number].outvars)
    out = [var for var in own if var in handed]
    part: Jaxpr = jaxpr.replace(invars=list(read), outvars=out, eqns=eqns)
    return part
