"""Rule on PRNG keys that all replicas share."""

import ast
import re
from typing import TYPE_CHECKING

from replicax.verify.rules.finding import spot
from replicax.verify.rules.value import Value, derived

if TYPE_CHECKING:
    from replicax.verify.rules.machine import Machine
    from replicax.verify.rules.scope import Replica

_TAKES_KEY = re.compile(r"^(rngs?|dropout_(rng|key)|noise_(rng|key))$")
_SAMPLERS = {
    "bernoulli",
    "categorical",
    "exponential",
    "gumbel",
    "laplace",
    "normal",
    "rademacher",
    "randint",
    "truncated_normal",
    "uniform",
}
_INITIAL = {"params", "param"}


def check_keywords(
    machine: "Machine", node: ast.AST, keywords: dict[str, Value], function: Value
) -> None:
    """`model.apply(..., rngs={"dropout": key})` with a key that is equal on all replicas."""
    replica = machine.replica
    if replica is None or isinstance(getattr(function.callee, "node", None), ast.AST):
        return
    called = getattr(function.callee, "name", "")
    if called in ("init", "init_with_output") or called.endswith(".Rngs"):
        return
    for name, value in keywords.items():
        if not _TAKES_KEY.match(name):
            continue
        items = value.items if value.items is not None else {"": value}
        for kind, item in items.items():
            if kind not in _INITIAL and item.key and item.varies is False:
                replica.shared_keys.append(spot(node))


def sample(
    machine: "Machine", name: str, args: list[Value], keywords: dict[str, Value], node: ast.AST
) -> Value:
    """The result of `jax.random.<name>(...)`."""
    values = [*args, *keywords.values()]
    value = derived(values)
    if name in ("key", "split", "fold_in", "wrap_key_data", "clone"):
        return value.but(key=True, grads=frozenset(), stacked="")
    replica = machine.replica
    if replica is not None and name in _SAMPLERS and args:
        shapes = [*args[1:], *(keywords[each] for each in ("shape",) if each in keywords)]
        roots = frozenset().union(*(leaf.shape_of for each in shapes for leaf in each.leaves))
        key = derived(args[:1])
        if roots and args[0].key and key.varies is False:
            replica.shared_keys.append((spot(node), roots))
    return Value(varies=value.varies, roots=value.roots)


def check_shared(machine: "Machine", replica: "Replica") -> None:
    """Report the shared keys of a replica's function once it is known to be a training step."""
    for each in replica.shared_keys:
        where, roots = each if isinstance(each[1], frozenset) else (each, None)
        if not replica.differentiates:
            continue
        if roots is not None:
            split = any(_under(root, replica.split) for root in roots)
            parameters = any(_under(root, replica.differentiated) for root in roots)
            if parameters or not split:
                continue
        machine.report.add(
            "shared-key",
            where,
            "every replica has the same key here, so all draw the same mask or noise for their "
            "different rows",
            "key = jax.random.fold_in(key, jax.lax.axis_index(axis_name)) first",
        )


def _under(root: str, names: set[str]) -> bool:
    parts = root.split(".")
    return any(".".join(parts[:end]) in names for end in range(1, len(parts) + 1))
