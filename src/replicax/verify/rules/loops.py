"""Rules on the training loop: what is fetched, and what is compiled, at every turn."""

import ast
from typing import TYPE_CHECKING

from replicax.verify.rules.finding import WARNING, spot
from replicax.verify.rules.names import BATCH
from replicax.verify.rules.scope import JIT, PMAP, Loop, Parallel
from replicax.verify.rules.value import (
    Differentiated,
    Function,
    Known,
    Method,
    Partial,
    Value,
    derived,
)

if TYPE_CHECKING:
    from replicax.verify.rules.machine import Machine

_FETCHES = {
    "float",
    "int",
    "print",
    "numpy.asarray",
    "numpy.array",
    "numpy.mean",
    "jax.device_get",
    "wandb.log",
}
_FETCHING_METHODS = {"item", "tolist", "set_postfix", "set_description", "add_scalar"}


def check_fetch(
    machine: "Machine",
    node: ast.Call,
    function: Value,
    args: list[Value],
    keywords: dict[str, Value],
) -> None:
    """Report `float(loss)` and its like where the loop does it after every step."""
    if not machine.loops or machine.traced:
        return
    callee = function.callee
    if isinstance(callee, Known) and callee.name in _FETCHES:
        values = [*args, *keywords.values()]
    elif isinstance(callee, Method) and callee.name in ("item", "tolist"):
        values = [callee.receiver]
    elif isinstance(callee, Method) and callee.name in _FETCHING_METHODS:
        values = [*args, *keywords.values()]
    else:
        return
    loop = machine.loops[-1]
    if loop.guards or loop.quiet or loop.each:
        return
    if loop.number in derived(values).loops:
        machine.report.add(
            "fetched-every-step",
            spot(node),
            "the host waits here for the devices at every step, and they wait for the host to "
            "start the next one",
            "fetch every n steps (if step % n == 0:), or keep the arrays and fetch them after the "
            "loop",
            WARNING,
        )


def check_compiled(machine: "Machine", made: Parallel) -> None:
    """Report what is made parallel and called in the same turn of a loop."""
    if not made.loop or not machine.loops or machine.loops[-1].number != made.loop:
        return
    if _is_configured(machine.loops[-1], made):
        return
    what = {PMAP: "pmap", JIT: "jit"}.get(made.kind, "shard_map")
    machine.report.add(
        "compiled-in-loop",
        spot(made.node),
        f"{what} of a new function at every turn of the loop: it is traced and compiled anew each "
        "time",
        f"make it once before the loop: step = jax.{what}(...)",
        WARNING,
    )


def _is_configured(loop: Loop, made: Parallel) -> bool:
    """Whether the loop goes over configurations, each of which needs a function of its own."""
    if loop.each or any(value.target == loop.target != "" for value in made.options.values()):
        return True
    callee = made.callee
    while isinstance(callee, Partial | Differentiated | Parallel):
        callee = callee.callee
    if not isinstance(callee, Function):
        return False
    if callee.scope is not loop.scope:
        # Made by a function to which the loop gives something of its own.
        scope = callee.scope
        while scope is not None and scope is not loop.scope:
            if any(value.target for value in scope.names.values()):
                return True
            scope = scope.parent
    used = {each.id for each in ast.walk(callee.node) if isinstance(each, ast.Name)}
    return loop.target in used and not BATCH.match(loop.target)
