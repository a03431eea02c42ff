"""pmap, shard_map and jit: what they make, and the walk through what they run."""

import ast
import re
from typing import TYPE_CHECKING, Any

from replicax.verify.rules.batches import check_in_shardings, check_inputs
from replicax.verify.rules.gradients import check_result
from replicax.verify.rules.keys import check_shared
from replicax.verify.rules.loops import check_compiled
from replicax.verify.rules.names import canonical
from replicax.verify.rules.scope import JIT, PMAP, SHARD_MAP, Parallel, Replica
from replicax.verify.rules.value import (
    NOTHING,
    Differentiated,
    Function,
    Known,
    Method,
    Partial,
    Value,
    mapped,
    unknown,
)

if TYPE_CHECKING:
    from replicax.verify.rules.machine import Machine

_OLD_SHARD_MAP = "jax.experimental.shard_map.shard_map"
MAKERS = {
    "jax.pmap": PMAP,
    "jax.shard_map": SHARD_MAP,
    _OLD_SHARD_MAP: SHARD_MAP,
    "jax.jit": JIT,
}
_POSITIONAL = {
    "jax.pmap": ("f", "axis_name"),
    "jax.shard_map": ("f",),
    _OLD_SHARD_MAP: ("f", "mesh", "in_specs", "out_specs", "check_rep"),
    "jax.jit": ("f",),
}
_STEP = re.compile(r"train|update|step|learn")
_NO_STEP = re.compile(r"eval|valid|test|init|predict|infer|sample|generate")


def make_parallel(
    machine: "Machine", name: str, args: list[Value], keywords: dict[str, Value], node: ast.AST
) -> Value:
    """The result of `jax.pmap(f, ...)` and its like; without `f`, a decorator."""
    name = canonical(name)
    options = {**dict(zip(_POSITIONAL[name], args, strict=False)), **keywords}
    function = options.pop("f", None) or options.pop("fun", None)
    if function is None:
        return Value(callee=Partial(Known(name), (), options))
    kind = MAKERS[name]
    callee = function.callee
    if machine.replica is not None or (kind == JIT and machine.traced):
        return Value(callee=callee, varies=False)
    check = options.get("check_vma", options.get("check_rep", NOTHING)).constant
    checks = kind == SHARD_MAP and check is not False
    certain = (
        kind != SHARD_MAP
        or check in (True, False)
        or not ({"check_vma", "check_rep", "**"} & set(options))
    )
    made = Parallel(kind, callee, node, options, checks=checks)
    made.loop = _fresh_in_loop(machine, kind, callee)
    if kind == JIT:
        made.checks = False
        check_in_shardings(machine, made)
    if not certain:
        made.callee = None
    machine.parallels.append(made)
    machine.waiting.append(made)
    return Value(callee=made, varies=False)


def _fresh_in_loop(machine: "Machine", kind: str, callee: Any) -> int:
    """The loop each turn of which compiles anew, or 0: what is compiled is kept by function."""
    if not machine.loops:
        return 0
    loop = machine.loops[-1].number
    if kind == SHARD_MAP or isinstance(callee, Parallel):
        return loop
    return loop if getattr(callee, "loop", 0) == loop else 0


def reduces_over(replica: Replica, axis: Value) -> bool:
    """Whether a collective over `axis` is one over the replicas."""
    own = replica.parallel.options.get("axis_name", NOTHING)
    if replica.parallel.kind != PMAP or not isinstance(own.constant, str):
        return True
    names = [leaf.constant for leaf in axis.leaves]
    return own.constant in names or not all(isinstance(name, str) for name in names)


def run_parallel(machine: "Machine", made: Parallel) -> Value:
    """Walk the function once, as one replica runs it; what it returns."""
    if made.result is not None:
        return made.result
    made.result = NOTHING
    saved = machine.replica, machine.traced, machine.loops
    before = machine.differentiations
    machine.replica = None if made.kind == JIT else Replica(made)
    made.replica = machine.replica
    machine.traced, machine.loops = True, []
    made.result = _run(machine, made)
    if machine.replica is not None:
        machine.replica.differentiates = machine.differentiations > before
        specs = made.options.get("out_specs") if made.kind == SHARD_MAP else None
        check_result(machine, made.result, specs)
        check_shared(machine, machine.replica)
        machine.statistics += machine.replica.statistics
    machine.differentiates[made] = machine.differentiations > before
    machine.replica, machine.traced, machine.loops = saved
    return made.result


def _run(machine: "Machine", made: Parallel) -> Value:
    from replicax.verify.rules.calls import call_callee

    callee, bound = made.callee, 0
    while isinstance(callee, Partial | Differentiated):
        bound += len(callee.args) if isinstance(callee, Partial) else 0
        callee = callee.callee
    if isinstance(callee, Parallel):
        # jit(pmap(f)) and jit(shard_map(f)).
        return mapped(run_parallel(machine, callee), lambda leaf: leaf)
    if not isinstance(callee, Function):
        return unknown([])
    listed = callee.node.args
    names = [each.arg for each in (*listed.posonlyargs, *listed.args)]
    if callee.owner and callee.receiver is not None:
        names = names[1:]
    args = [_argument(made, place, name) for place, name in enumerate(names[bound:])]
    return call_callee(machine, made.callee, args, {})


def _argument(made: Parallel, place: int, name: str) -> Value:
    key = bool(re.search(r"(^|_)(rng|key)s?$", name))
    value = Value(roots=frozenset([name]), key=key)
    if made.kind == JIT:
        return value
    replicated = _is_replicated(made, place)
    if replicated is False and made.replica is not None:
        made.replica.split.add(name)
    if made.kind == SHARD_MAP:
        return value.but(varies=None if replicated is None else not replicated)
    return value.but(varies=False if replicated else None)


def _is_replicated(made: Parallel, place: int) -> bool | None:
    """Whether an argument is the same on all replicas, by its spec; None where that is unseen."""
    option = "in_axes" if made.kind == PMAP else "in_specs"
    static = made.options.get("static_broadcasted_argnums", NOTHING)
    if place in [leaf.constant for leaf in static.leaves if type(leaf.constant) is int]:
        return True
    spec = made.options.get(option)
    if spec is None:
        return False if made.kind == PMAP else None
    if spec.items is not None:
        spec = spec.items.get(place, NOTHING)
    leaves = {leaf.spec or ("split" if leaf.constant == 0 else "") for leaf in spec.leaves}
    if len(leaves) != 1:
        return None
    only = leaves.pop()
    return {"none": True, "replicated": True, "split": False}.get(only)


def is_step(machine: "Machine", made: Parallel) -> bool:
    """Whether this is a training step: it differentiates, or is unseen and called like one."""
    if machine.differentiates.get(made):
        return True
    callee: Any = made.callee
    while isinstance(callee, Partial | Parallel):
        callee = callee.callee
    name = getattr(callee, "name", "") if isinstance(callee, Known | Method) else ""
    last = name.rpartition(".")[2].lower()
    return bool(_STEP.search(last)) and not _NO_STEP.search(last)


def call_parallel(
    machine: "Machine",
    made: Parallel,
    args: list[Value],
    keywords: dict[str, Value],
    node: ast.AST,
) -> Value:
    """What calling a parallel function returns, on the host or in jit."""
    if machine.replica is not None:
        return unknown([*args, *keywords.values()])
    result = run_parallel(machine, made)
    if machine.traced:
        return mapped(result, lambda leaf: leaf.but(updates=frozenset(), roots=frozenset()))
    check_compiled(machine, made)
    check_inputs(machine, made, args, node)
    turn = frozenset([machine.loops[-1].number]) if machine.loops else frozenset[int]()
    loops = turn if is_step(machine, made) else frozenset[int]()
    return _outputs(made, result, loops)


def _outputs(made: Parallel, result: Value, loops: frozenset[int]) -> Value:
    axes = made.options.get("out_axes", Value(constant=0)) if made.kind == PMAP else NOTHING

    def one(leaf: Value, axis: Value) -> Value:
        opaque = leaf.items is None and not (leaf.form or leaf.grads or leaf.updates)
        if axis.spec == "none":
            stacked = "single"
        elif made.kind == PMAP and type(axis.constant) is int:
            stacked = "stacked"
        else:
            stacked = ""
        return Value(loops=loops, stacked=stacked, opaque=opaque, key=leaf.key)

    def each(value: Value, axis: Value) -> Value:
        if value.items is None and axis.items is not None and axis is axes:
            items = {place: one(NOTHING, inner) for place, inner in axis.items.items()}
            return Value(items=items, loops=loops)
        if value.items is None:
            return one(value, axis)
        items = {}
        for place, item in value.items.items():
            inner = axis.items.get(place, NOTHING) if axis.items is not None else axis
            items[place] = each(item, inner).but(opaque=False)
        return Value(items=items, loops=loops)

    outputs = each(result, axes)
    return outputs
