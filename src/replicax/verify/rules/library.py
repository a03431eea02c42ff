"""What functions of JAX, optax, Flax and NumPy return."""

import ast
from collections.abc import Callable
from typing import TYPE_CHECKING

from replicax.verify.rules import batches, keys, parallels, reductions
from replicax.verify.rules.arithmetic import named_operation
from replicax.verify.rules.finding import spot
from replicax.verify.rules.gradients import hidden, reduce, update
from replicax.verify.rules.value import (
    NOTHING,
    TOTAL,
    Differentiated,
    Known,
    Partial,
    Value,
    derived,
    mapped,
    merged,
    unknown,
    without_gradient,
)

if TYPE_CHECKING:
    from replicax.verify.rules.machine import Machine

Args = list[Value]
Keywords = dict[str, Value]
Handler = Callable[["Machine", Args, Keywords, ast.AST], Value]
_PURE = ("jax", "numpy", "optax", "flax", "functools", "operator", "chex", "math", "itertools")
_ARRAYS = ("jax.numpy.", "numpy.")
_KEEPS_FORM = {"asarray", "array", "squeeze", "float32", "reshape", "nan_to_num"}
_BOUNDS = {"maximum", "minimum", "clip", "max", "min"}
_NO_GRADIENT = {
    "zeros_like",
    "ones_like",
    "zeros",
    "ones",
    "full_like",
    "sign",
    "isfinite",
    "isnan",
}
_NO_GRADIENT |= {"all", "any", "argmax", "argmin", "max", "min", "std", "var", "vdot", "norm"}
_COUNTS = {"jax.device_count", "jax.local_device_count", "jax.lax.axis_size"}
_DEVICE_LISTS = {"jax.devices", "jax.local_devices"}
_MOVES = {"all_gather", "psum_scatter", "all_to_all", "ppermute", "pshuffle", "pbroadcast"}
_WRAPPERS = {"vmap", "checkpoint", "custom_vjp", "custom_jvp", "named_call", "named_scope"}
_MESHES = {"jax.sharding.Mesh", "jax.make_mesh", "jax.sharding.AbstractMesh"}


def call_known(
    machine: "Machine", name: str, args: Args, keywords: Keywords, node: ast.AST
) -> Value:
    """The result of a library's function, by its canonical name."""
    values = [*args, *keywords.values()]
    module, _, last = name.rpartition(".")
    special = _SPECIAL.get(name)
    if special is not None:
        return special(machine, args, keywords, node)
    if name in parallels.MAKERS:
        return parallels.make_parallel(machine, name, args, keywords, node)
    if module == "jax.random":
        return keys.sample(machine, last, args, keywords, node)
    if module == "jax" and last in _WRAPPERS:
        inner = args[0].callee if args else Partial(Known(name), (), keywords)
        return Value(callee=inner)
    if module == "jax.lax" and last in ("pmean", "psum", "pmax", "pmin"):
        return _collective(machine, last, args, keywords, node)
    if module == "jax.lax" and last in _MOVES:
        return hidden(derived(args)).but(varies=None, updates=frozenset(), reduced=True)
    if name in _COUNTS or name in _DEVICE_LISTS:
        return Value(varies=False, devices=True)
    if name in _MESHES:
        machine.file_has_mesh = True
        return Value(varies=False, mesh=True)
    if name.startswith(_ARRAYS) or name.startswith("jax.lax."):
        return _array_function(machine, last, args, keywords, node)
    if module == "operator":
        return named_operation(machine, last, args, node) or derived(values)
    if name.startswith(("jax.tree_util.tree_", "jax.tree.")):
        return _tree_function(machine, last.removeprefix("tree_"), args, values, node)
    if name.partition(".")[0] in _PURE:
        result = derived(values)
        return result.but(stacked="") if "norm" not in last else without_gradient(result)
    return unknown(values)


def _array_function(
    machine: "Machine", last: str, args: Args, keywords: Keywords, node: ast.AST
) -> Value:
    values = [*args, *keywords.values()]
    operation = named_operation(machine, last, args, node)
    if operation is not None:
        return operation
    if last in ("mean", "nanmean", "average", "sum", "nansum") and args:
        first = args[1:] if last != "average" else [args[0], *args[2:]]
        return reductions.reduction(last, args[0], first, keywords, node)
    if last == "reshape" and args:
        batches.check_reshape(machine, args[0], args[1:], node)
    result = derived(values)
    if last in _BOUNDS and args:
        other = args[1:] or [NOTHING]
        if args[0].form == TOTAL and all(isinstance(v.constant, int | float) for v in other):
            return derived(args[:1]).but(form=TOTAL)
        for one, two in ((0, 1), (1, 0)):
            if len(args) == 2 and args[one].form == TOTAL and args[two].varies is False:
                return derived([args[one]]).but(form=TOTAL)
    if last == "where" and len(args) == 3:
        return result.but(form=args[1].form if args[2].varies is False else "")
    if last in _NO_GRADIENT:
        return without_gradient(result)
    if last in _KEEPS_FORM and args:
        return result.but(form=args[0].form, division=args[0].division)
    return result


def _tree_function(machine: "Machine", last: str, args: Args, values: Args, node: ast.AST) -> Value:
    if last == "map" and args:
        return _tree_map(machine, args[0], args[1:], node)
    if last in ("reduce", "all"):
        return without_gradient(derived(values))
    if last in ("leaves", "flatten") and args:
        return derived(args[:1])
    return derived(values)


def _tree_map(machine: "Machine", function: Value, trees: Args, node: ast.AST) -> Value:
    from replicax.verify.rules.calls import call_callee

    first = trees[0] if trees else NOTHING
    if first.items is not None:
        items = {}
        for place in first.items:
            rest = [tree.items.get(place, tree) if tree.items else tree for tree in trees[1:]]
            items[place] = _tree_map(machine, function, [first.items[place], *rest], node)
        return first.but(items=items)
    given = [tree if tree.items is None else derived([tree]) for tree in trees]
    return call_callee(machine, function.callee, [one.but(opaque=False) for one in given], {}, node)


def _collective(
    machine: "Machine", operation: str, args: Args, keywords: Keywords, node: ast.AST
) -> Value:
    if not args:
        return Value(callee=Partial(Known(f"jax.lax.{operation}"), (), keywords))
    value = args[0]
    if operation == "psum" and isinstance(value.constant, int):
        return Value(varies=False, devices=True, reduced=True)
    axis = keywords.get("axis_name", args[1] if len(args) > 1 else NOTHING)
    replica = machine.replica
    if replica is not None and not parallels.reduces_over(replica, axis):
        return derived([value])
    if operation in ("pmax", "pmin"):
        return without_gradient(derived([value])).but(varies=False, reduced=True)
    return reduce(machine, value, operation, spot(node))


def _differentiation(with_value: bool) -> Handler:
    def make(machine: "Machine", args: Args, keywords: Keywords, node: ast.AST) -> Value:
        if not args:
            name = "jax.value_and_grad" if with_value else "jax.grad"
            return Value(callee=Partial(Known(name), (), keywords))
        numbers = keywords.get("argnums", args[1] if len(args) > 1 else NOTHING)
        which: tuple[int, ...] | int = 0
        if numbers.items is not None:
            which = tuple(v.constant for v in numbers.items.values() if type(v.constant) is int)
        elif type(numbers.constant) is int:
            which = numbers.constant
        has_aux = keywords.get("has_aux", NOTHING).constant is True
        loop = machine.loops[-1].number if machine.loops else 0
        callee = args[0].callee
        return Value(
            callee=Differentiated(callee, with_value, has_aux, which or 0, spot(node), loop)
        )

    return make


def _partial(machine: "Machine", args: Args, keywords: Keywords, node: ast.AST) -> Value:
    if not args or args[0].callee is None:
        return unknown([*args, *keywords.values()])
    loop = machine.loops[-1].number if machine.loops else 0
    return Value(callee=Partial(args[0].callee, tuple(args[1:]), keywords, loop))


def _scan(machine: "Machine", args: Args, keywords: Keywords, node: ast.AST) -> Value:
    function = args[0] if args else keywords.get("f", NOTHING)
    carry = args[1] if len(args) > 1 else keywords.get("init", NOTHING)
    xs = args[2] if len(args) > 2 else keywords.get("xs", NOTHING)
    carry, outputs = _turns(machine, function, carry, lambda held: [held, derived([xs])], True)
    return Value(items={0: carry, 1: outputs})


def _fori_loop(machine: "Machine", args: Args, keywords: Keywords, node: ast.AST) -> Value:
    if len(args) < 4:
        return unknown([*args, *keywords.values()])
    index = Value(varies=False)
    return _turns(machine, args[2], args[3], lambda held: [index, held], False)[0]


def _while_loop(machine: "Machine", args: Args, keywords: Keywords, node: ast.AST) -> Value:
    if len(args) < 3:
        return unknown([*args, *keywords.values()])
    return _turns(machine, args[1], args[2], lambda held: [held], False)[0]


def _turns(
    machine: "Machine",
    function: Value,
    carry: Value,
    given: Callable[[Value], Args],
    pair: bool,
) -> tuple[Value, Value]:
    """Two turns of a loop, with what the second finds carried over from the first."""
    from replicax.verify.rules.calls import call_callee

    outputs = NOTHING
    for _ in range(2):
        result = call_callee(machine, function.callee, given(carry), {})
        if pair and result.items is not None:
            outputs = result.items.get(1, NOTHING)
            result = result.items.get(0, NOTHING)
        elif pair:
            outputs = derived([result])
        carry = result
    return carry, outputs


def _cond(machine: "Machine", args: Args, keywords: Keywords, node: ast.AST) -> Value:
    from replicax.verify.rules.calls import call_callee

    if len(args) < 3:
        return unknown([*args, *keywords.values()])
    first = call_callee(machine, args[1].callee, args[3:], {})
    return merged(first, call_callee(machine, args[2].callee, args[3:], {}))


def _switch(machine: "Machine", args: Args, keywords: Keywords, node: ast.AST) -> Value:
    from replicax.verify.rules.calls import call_callee

    if len(args) < 2 or args[1].items is None:
        return unknown([*args, *keywords.values()])
    results = [call_callee(machine, v.callee, args[2:], {}) for v in args[1].items.values()]
    result = results[0]
    for other in results[1:]:
        result = merged(result, other)
    return result


def _map(machine: "Machine", args: Args, keywords: Keywords, node: ast.AST) -> Value:
    from replicax.verify.rules.calls import call_callee

    if not args:
        return NOTHING
    return derived([call_callee(machine, args[0].callee, [derived(args[1:])], {})])


def _apply_updates(machine: "Machine", args: Args, keywords: Keywords, node: ast.AST) -> Value:
    params = keywords.get("params", args[0] if args else NOTHING)
    updates = keywords.get("updates", args[1] if len(args) > 1 else NOTHING)
    return update(machine, params, updates, spot(node))


def _varying(machine: "Machine", args: Args, keywords: Keywords, node: ast.AST) -> Value:
    return mapped(args[0], lambda leaf: leaf.but(varies=True)) if args else NOTHING


def _axis_index(machine: "Machine", args: Args, keywords: Keywords, node: ast.AST) -> Value:
    return Value(varies=True)


def _partition_spec(machine: "Machine", args: Args, keywords: Keywords, node: ast.AST) -> Value:
    empty = all(each.spec == "none" for each in args)
    return Value(varies=False, spec="replicated" if empty else "split")


def _named_sharding(machine: "Machine", args: Args, keywords: Keywords, node: ast.AST) -> Value:
    machine.file_has_mesh = True
    spec = keywords.get("spec", args[1] if len(args) > 1 else NOTHING)
    return Value(varies=False, spec=spec.spec)


def _length(machine: "Machine", args: Args, keywords: Keywords, node: ast.AST) -> Value:
    value = derived(args)
    return Value(
        varies=False,
        size=True,
        devices=bool(args) and args[0].devices,
        roots=value.roots,
        shape_of=value.roots,
    )


def _dictionary(machine: "Machine", args: Args, keywords: Keywords, node: ast.AST) -> Value:
    return Value(items=dict(keywords)) if keywords and not args else derived(args)


def _unreplicate(machine: "Machine", args: Args, keywords: Keywords, node: ast.AST) -> Value:
    return derived(args).but(stacked="", opaque=False)


def _plain_number(machine: "Machine", args: Args, keywords: Keywords, node: ast.AST) -> Value:
    value = without_gradient(derived(args))
    size = any(arg.size for arg in args)
    return value.but(loops=frozenset(), size=size, devices=any(arg.devices for arg in args))


_SPECIAL: dict[str, Handler] = {
    "functools.partial": _partial,
    "jax.tree_util.Partial": _partial,
    "jax.grad": _differentiation(False),
    "jax.value_and_grad": _differentiation(True),
    "jax.lax.scan": _scan,
    "jax.lax.fori_loop": _fori_loop,
    "jax.lax.while_loop": _while_loop,
    "jax.lax.cond": _cond,
    "jax.lax.switch": _switch,
    "jax.lax.map": _map,
    "jax.lax.axis_index": _axis_index,
    "jax.lax.pcast": _varying,
    "jax.lax.pvary": _varying,
    "optax.apply_updates": _apply_updates,
    "equinox.apply_updates": _apply_updates,
    "jax.sharding.PartitionSpec": _partition_spec,
    "jax.sharding.NamedSharding": _named_sharding,
    "jax.device_put": batches.device_put,
    "flax.jax_utils.unreplicate": _unreplicate,
    "len": _length,
    "dict": _dictionary,
    "float": _plain_number,
    "int": _plain_number,
    "max": lambda machine, args, keywords, node: _array_function(
        machine, "maximum", args, keywords, node
    ),
}
