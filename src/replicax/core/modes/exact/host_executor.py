"""Run a jaxpr of one micro-shard on all micro-shards, cut into programs.

For example, the step in `split_trace.py`, with `w` 0.5 and the rows 0 to 7 in four micro-shards, on
two devices. Entry n of a `MicroShardValues` holds the n-th micro-shard of every device, here
separated by bars; so each call of a program computes one micro-shard on every device:

    x               [0, 1 | 4, 5], [2, 3 | 6, 7]
    step.0  w x[0]  g = [0.462 | 4.159]     micro-shards 0 and 2
    step.0  w x[1]  g = [2.311 | 6.008]     micro-shards 1 and 3
    TreeSum         h = (0.462 + 2.311) + (4.159 + 6.008) = 12.939
    step.1  w h     i = -12.489, on both devices

On one device `x` has four entries, and `step.0` is called four times. It is the same program, with
the same operands for each micro-shard, so `g` has the same bits; `TreeSum` adds the same pairs.

Loops and branches around sums run on the host; every iteration uses the same programs. A scan of
three turns over that step, which also returns `w * 2` of each turn, calls

    step.0.0  step.0.0  step.0.1     in each turn, on two devices: the sums, and the update
    step.2.0                         after the last: it stacks what the turns return

A `lax.cond` whose predicate is `w > 0` is three programs: `step.0` computes the predicate, the host
reads it, and `step.1.0` and `step.1.1`, those of the branch around the sum, are called if it holds.
"""

import collections
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal, Var, jaxpr_as_fun

from replicax.core.ground.leaves import from_host
from replicax.core.jaxprs.jaxpr import scan_counts, shapes_of, variables
from replicax.core.modes.exact.combining_programs import CollectivePrograms
from replicax.core.modes.exact.micro_shard_primitives import gather_p, own, own_of, scanned, turned
from replicax.core.modes.exact.part_results import PartResults
from replicax.core.modes.exact.replica_program import ReplicaProgram
from replicax.core.modes.exact.split_trace import Exchange, Item, Segment, split_trace
from replicax.core.placement.mesh import ShardDim, sharding_of

Known = dict[Var, Any]
"""Values by variable: an array that is equal on all devices, or `MicroShardValues`."""
_Operation = Callable[[list[Any]], list[Any]]
"""A function from the operands of an equation to its results."""


class HostExecutor:
    """A jaxpr cut where micro-shards are combined, each part compiled once for all devices.

    Arguments are laid out as in `into`, and results that differ by micro-shard as in `out`; the
    memory of `donated` arguments may be reused. The parts are compiled with `options` of XLA.
    """

    def __init__(
        self,
        name: str,
        closed: ClosedJaxpr,
        into: Sequence[ShardDim],
        out: Sequence[ShardDim],
        collectives: CollectivePrograms,
        options: Mapping[str, Any],
        donated: Sequence[bool] = (),
    ) -> None:
        self.name, self.collectives, self._options = name, collectives, options
        self.programs: list[ReplicaProgram] = []
        """The parts that perform arithmetic, in execution order."""
        self._cut = split_trace(closed, into, out)
        self._consts = [self.placed(const) for const in self._cut.consts]
        given = self._cut.jaxpr.invars[len(self._consts) :]
        self._free = {var for var, free in zip(given, donated, strict=False) if free}
        later = self._later()
        self._runs = [
            (self._made(item, after, number in later), after)
            for number, (item, after) in enumerate(
                zip(self._cut.items, self._cut.unneeded, strict=True)
            )
        ]

    @property
    def out(self) -> list[ShardDim]:
        """Return the layout of each result."""
        return [self._shard_dim(atom) for atom in self._cut.jaxpr.outvars]

    def __call__(self, values: Sequence[Any]) -> list[Any]:
        """Return the results for the arguments: arrays equal on all devices, or by shard."""
        values = [*self._consts, *values]
        known: Known = dict(zip(self._cut.jaxpr.invars, values, strict=True))
        # Values are dropped after the last item that reads them, so that the next one may have
        # their memory: `values` must not hold them meanwhile.
        del values
        for run, after in self._runs:
            run(known)
            for var in after:
                del known[var]
        return [self._read(atom, known) for atom in self._cut.jaxpr.outvars]

    def program(
        self, jaxpr: Any, into: Sequence[ShardDim], out: Sequence[ShardDim], **more: Any
    ) -> Any:
        """Compile and return one of its programs."""
        name = f"{self.name}.{len(self.programs)}"
        mesh, options = self.collectives.mesh, self._options
        self.programs.append(ReplicaProgram(name, jaxpr, mesh, into, out, options, **more))
        return self.programs[-1]

    def inner(
        self,
        function: Callable[..., Sequence[Any]],
        shapes: Sequence[Any],
        into: Sequence[ShardDim],
        out: Sequence[ShardDim],
    ) -> "HostExecutor":
        """Return `function`, written for arrays of one micro-shard, on values of all of them."""
        closed = jax.make_jaxpr(lambda *values: list(function(*values)))(*shapes)
        name = f"{self.name}.{len(self.programs)}"
        found = HostExecutor(name, closed, into, out, self.collectives, self._options)
        self.programs += found.programs
        return found

    def placed(self, value: Any) -> jax.Array:
        """Return a constant as an array replicated on all devices."""
        return from_host(value, sharding_of(self.collectives.mesh, None))

    def _later(self) -> set[int]:
        """Return the items before which all micro-shards are known, so that memory is reused.

        Values that are computed on demand need what they are computed from until then.
        """
        items = self._cut.items
        numbers = set(range(len(items)))
        if not self.collectives.on_demand:
            return numbers
        meet = (n for n, item in enumerate(items) if isinstance(item, Exchange) or item.sums)
        last = max(meet, default=-1)
        late = {
            var
            for item in items[last + 1 :]
            if isinstance(item, Segment)
            for var in variables(item.jaxpr.outvars)
        }
        results = variables(self._cut.jaxpr.outvars)
        early = any(self._shard_dim(var) is not None and var not in late for var in results)
        return set() if early or not self._free else {n for n in numbers if n > last}

    def _shard_dim(self, atom: Any) -> ShardDim:
        return None if isinstance(atom, Literal) else self._cut.shard_dims.get(atom)

    def _read(self, atom: Any, known: Known) -> Any:
        return self.placed(atom.val) if isinstance(atom, Literal) else known[atom]

    def _made(
        self, item: Item, unneeded: Sequence[Var], all_known: bool
    ) -> Callable[[Known], None]:
        """Return a function that computes the results of an item and adds them to `known`.

        `all_known` says whether all micro-shards are, so that it may reuse memory.
        """
        if isinstance(item, Segment) and item.own:
            return self._own(item, all_known)
        if isinstance(item, Segment):
            return self._alike(item, unneeded if all_known else ())
        primitive, eqns = item.eqns[0].primitive, item.eqns
        if primitive is gather_p:
            operate = self.collectives.gathered(eqns)
        else:
            [eqn] = eqns
            shard_dims = (
                [self._shard_dim(atom) for atom in each] for each in (eqn.invars, eqn.outvars)
            )
            operate = _HOST_LOOPS[primitive.name](self, eqn, *shard_dims)
        operands = [atom for eqn in eqns for atom in eqn.invars]
        results = [var for eqn in eqns for var in eqn.outvars]

        def meet(known: Known) -> None:
            found = operate([self._read(atom, known) for atom in operands])
            known.update(zip(results, found, strict=True))

        return meet

    def _alike(self, item: Segment, unneeded: Sequence[Var]) -> Callable[[Known], None]:
        # Only these reuse memory. The program of a micro-shard does not, as its next call reads the
        # shared arguments again.
        into, out = item.jaxpr.invars, variables(item.jaxpr.outvars)
        taken = _reusable(into, out, self._free & set(unneeded))
        program = self.program(item.jaxpr, [None] * len(into), [None] * len(out), donated=taken)

        def run(known: Known) -> None:
            known.update(zip(out, program(*(known[var] for var in into)), strict=True))

        return run

    def _own(self, item: Segment, all_known: bool) -> Callable[[Known], None]:
        into, out = item.jaxpr.invars, variables(item.jaxpr.outvars)
        program = self.program(
            item.jaxpr, *([self._shard_dim(var) for var in each] for each in (into, out))
        )
        place: dict[Any, int] = {var: number for number, var in enumerate(out)}
        by_shard = {var for var in out if self._shard_dim(var) is not None}
        # Operands of sums are only held until they are added; `kept` are the other results, of all
        # micro-shards.
        summed = [place[var] for eqn in item.sums for var in eqn.invars]
        kept = [number for number in range(len(out)) if number not in summed]
        totals = [var for eqn in item.sums for var in eqn.outvars]
        sums = self.collectives.summed(item.sums) if totals else None

        def run(known: Known) -> None:
            values = [known[var] for var in into]
            results = PartResults(
                lambda n: program(*(v[n] if isinstance(v, list) else v for v in values)),
                self.collectives.shares,
                kept,
            )
            if sums is not None:
                found = sums(lambda n: _chosen(results(n), summed))
                known.update(zip(totals, found, strict=True))
            shards = results.finished() if all_known else results.on_demand()
            # A branch may return values that depend on rows and others that do not.
            known.update(
                (out[n], of_all if out[n] in by_shard else of_all[0])
                for n, of_all in zip(kept, shards, strict=True)
            )

        return run


def _chosen(arrays: list[jax.Array], numbers: Sequence[int]) -> list[jax.Array]:
    return [arrays[n] for n in numbers]


def _reusable(into: Sequence[Any], out: Sequence[Any], free: set[Var]) -> list[int]:
    """Return the indices of `free` arguments whose memory a result can reuse."""
    kinds = collections.Counter((var.aval.shape, var.aval.dtype) for var in out)
    reused = []
    for number, var in enumerate(into):
        kind = (var.aval.shape, var.aval.dtype)
        if var in free and kinds[kind]:
            kinds[kind] -= 1
            reused.append(number)
    return reused


# Loops and branches around sums.


def _scan(
    parted: HostExecutor, eqn: JaxprEqn, into: list[ShardDim], out: list[ShardDim]
) -> _Operation:
    length, (consts, carried) = eqn.params["length"], scan_counts(eqn.params)
    body = jaxpr_as_fun(eqn.params["jaxpr"])
    avals = shapes_of(eqn.invars)
    owned, _ = scanned(eqn, [shard_dims is not None for shard_dims in into])
    split = consts + carried
    carry_owned, carry_avals = owned[consts:split], avals[consts:split]

    # The number of the turn is an argument, so that all turns are one program.
    def turn(*values: Any) -> list[Any]:
        *held, number = values
        rows = [lax.dynamic_index_in_dim(each, number, 0, keepdims=False) for each in held[split:]]
        after = body(*held[:split], *rows)
        return [*_as_own(after[:carried], carry_owned), *after[carried:]]

    # A carry may be shared before the first turn, and depend on rows after it. Every turn takes
    # what the one before returns, so it is made a value of each micro-shard beforehand.
    begin = parted.inner(
        lambda *carry: _as_own(carry, carry_owned), carry_avals, into[consts:split], out[:carried]
    )
    of_turn = [*into[:consts], *out[:carried], *into[split:], None]
    number_aval = jax.ShapeDtypeStruct((), np.int32)
    rows = [0] * (len(out) - carried)
    turns = parted.inner(turn, [*avals, number_aval], of_turn, [*out[:carried], *rows])
    gathered = shapes_of(eqn.outvars[carried:])
    stack = [
        parted.inner(
            lambda *each: [jnp.stack(each)],
            [jax.ShapeDtypeStruct(aval.shape[1:], aval.dtype)] * length,
            [how] * length,
            [shard_dims],
        )
        for aval, how, shard_dims in zip(gathered, turns.out[carried:], out[carried:], strict=True)
    ]
    order = range(length)[::-1] if eqn.params["reverse"] else range(length)

    def run(values: list[Any]) -> list[Any]:
        carry = begin(values[consts:split])
        results: list[list[Any]] = [[] for _ in range(length)]
        for number in order:
            given = [*values[:consts], *carry, *values[split:], parted.placed(np.int32(number))]
            after = turns(given)
            carry, results[number] = after[:carried], after[carried:]
        stacks = zip(stack, zip(*results, strict=True), strict=True)
        return [*carry, *(join(list(of_turns))[0] for join, of_turns in stacks)]

    return run


def _while_loop(
    parted: HostExecutor, eqn: JaxprEqn, into: list[ShardDim], out: list[ShardDim]
) -> _Operation:
    tested, consts = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    split, avals = tested + consts, shapes_of(eqn.invars)
    owned = turned(eqn, [shard_dims is not None for shard_dims in into])
    body = jaxpr_as_fun(eqn.params["body_jaxpr"])
    begin = parted.inner(lambda *carry: _as_own(carry, owned), avals[split:], into[split:], out)
    goes_on = parted.inner(
        jaxpr_as_fun(eqn.params["cond_jaxpr"]),
        [*avals[:tested], *avals[split:]],
        [*into[:tested], *out],
        [None],
    )
    turn = parted.inner(
        lambda *values: _as_own(body(*values), owned),
        avals[tested:],
        [*into[tested:split], *out],
        out,
    )

    def run(values: list[Any]) -> list[Any]:
        carry = begin(values[split:])
        while bool(np.asarray(goes_on([*values[:tested], *carry])[0])):
            carry = turn([*values[tested:split], *carry])
        return list(carry)

    return run


def _cond(
    parted: HostExecutor, eqn: JaxprEqn, into: list[ShardDim], out: list[ShardDim]
) -> _Operation:
    owned = own_of(eqn, [shard_dims is not None for shard_dims in into])
    avals = shapes_of(eqn.invars[1:])

    def compiled(branch: ClosedJaxpr) -> Any:
        function = jaxpr_as_fun(branch)
        return parted.inner(lambda *values: _as_own(function(*values), owned), avals, into[1:], out)

    branches = [compiled(branch) for branch in eqn.params["branches"]]
    return lambda values: list(branches[int(np.asarray(values[0]))](values[1:]))


def _as_own(values: Sequence[Any], owned: Sequence[bool]) -> list[Any]:
    """Return `values`, with those that are `owned` marked as differing by micro-shard."""
    return [own(each) if is_own else each for each, is_own in zip(values, owned, strict=True)]


_HOST_LOOPS: dict[
    str, Callable[[HostExecutor, JaxprEqn, list[ShardDim], list[ShardDim]], _Operation]
] = {
    "scan": _scan,
    "while": _while_loop,
    "cond": _cond,
}
