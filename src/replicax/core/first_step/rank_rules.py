"""Find rules of an optimizer by rank that meet parameters of stacked layers.

A mask such as `leaf.ndim > 1`, or the default of `optax.contrib.muon`, takes the `[layers, width]`
of a model that scans over its layers for a matrix, and `[layers, width, width]` for none. What an
optimizer does with a stack is compared with what it does with one layer, in its trace.
"""

import collections
import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, JaxprEqn, jaxprs_in_params
from jax.interpreters.partial_eval import dce_jaxpr

from replicax.core.ground.leaves import PyTree, by_path, kind
from replicax.core.jaxprs.jaxpr import CALLS, REMATS, called, evaluate_jaxpr, of_scan
from replicax.core.jaxprs.row_rules import BY_ENTRY
from replicax.core.step.optimizer import Updater
from replicax.text.wording import counted

_SAME = CALLS | REMATS | {"convert_element_type", "optimization_barrier", "copy"}
_COUNTED = BY_ENTRY - {"clamp", "convert_element_type", "select_n"} | {"dot_general", "scan"}


def scanned_inputs(traced: ClosedJaxpr, first: int, count: int) -> list[bool]:
    """Return which of `count` inputs, from the `first` on, a `lax.scan` runs over."""
    found = set[int]()

    def apply(eqn: JaxprEqn, values: list[int | None]) -> Sequence[int | None]:
        name = eqn.primitive.name
        if name in CALLS | REMATS:
            return evaluate_jaxpr(called(eqn), values, apply, lambda _: None)
        if name == "scan":
            found.update(each for each in of_scan(eqn.params, values)[2] if each is not None)
        if name in _SAME and len(values) == len(eqn.outvars):
            return values
        return [None] * len(eqn.outvars)

    inputs = range(len(traced.in_avals))
    evaluate_jaxpr(traced, list(inputs), apply, lambda _: None)
    return [first + at in found for at in range(count)]


def rank_rule(updater: Updater, params: PyTree, traced: ClosedJaxpr) -> str | None:
    """Return one line if stacks of layers are updated by another rule than one layer, else None.

    The inputs of `traced`, a loss, are the leaves of a state, whose first is the step.
    """
    leaves, structure = jax.tree.flatten(jax.eval_shape(lambda params: params, params))
    stacks = scanned_inputs(traced, 1, len(leaves))
    if not any(stacks):
        return None
    layers = [
        jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype) if stacked else leaf
        for leaf, stacked in zip(leaves, stacks, strict=True)
    ]
    found = list[str]()
    with contextlib.suppress(Exception):  # an optimizer may be made for these shapes
        both = (_operations(updater, structure, each) for each in (leaves, layers))
        pairs = zip(by_path(params), stacks, *both, strict=True)
        found = [path for path, stacked, own, alone in pairs if stacked and own != alone]
    if not found:
        return None
    first = by_path(params)[found[0]]
    others = f" and {counted(len(found) - 1, 'other')}" if found[1:] else ""
    return (
        f"the optimizer updates {found[0]} {kind(first)}{others}, of stacked layers, by another "
        f"rule than one layer of {list(first.shape[1:])}: a rule by rank; choose by path, with "
        "mask= or rx.optimizers.muon(matrices=...)"
    )


def _operations(
    updater: Updater, structure: Any, leaves: Sequence[Any]
) -> list[collections.Counter[str]]:
    """Return how many operations of each kind compute the update of each leaf."""
    params = jax.tree.unflatten(structure, leaves)
    given = {"value": jax.ShapeDtypeStruct((), "float32")} if updater.takes_value else {}
    update: Callable[..., Any] = updater.optimizer.update
    state = jax.eval_shape(updater.optimizer.init, params)
    traced = jax.make_jaxpr(
        lambda gradient, state, params, given: update(gradient, state, params, **given)[0]
    )(params, state, params, given)
    ends = range(len(leaves))
    used = (dce_jaxpr(traced.jaxpr, [end == at for end in ends])[0] for at in ends)
    return list(map(_arithmetic, used))


def _arithmetic(jaxpr: Any) -> collections.Counter[str]:
    found = collections.Counter[str]()
    for eqn in jaxpr.eqns:
        found[eqn.primitive.name] += eqn.primitive.name in _COUNTED
        for inner in jaxprs_in_params(eqn.params):
            found += _arithmetic(inner)
    return +found
