"""Rules on gradients: where they are taken, reduced and used."""

import dataclasses
from typing import TYPE_CHECKING, Any

from replicax.verify.rules.finding import Spot
from replicax.verify.rules.scope import PMAP
from replicax.verify.rules.value import (
    AVERAGE,
    LOCAL,
    MASKED,
    MEAN,
    SCALED,
    SUM,
    SUMMED,
    TOTAL,
    UNKNOWN,
    Differentiated,
    Function,
    Gradient,
    Partial,
    Value,
    changed_gradients,
    derived,
    mapped,
)

if TYPE_CHECKING:
    from replicax.verify.rules.machine import Machine

_TWICE_FIX = (
    "differentiate the reduced loss, grad of lax.pmean(loss, axis), and do not reduce again; or "
    "pass check_vma=False and reduce once"
)


def differentiate(
    machine: "Machine", made: Differentiated, args: list[Value], keywords: dict[str, Value]
) -> Value:
    """The result of `grad(f)(*args)` or `value_and_grad(f)(*args)`."""
    from replicax.verify.rules.calls import call_callee

    machine.differentiations += 1
    numbers = made.numbers if isinstance(made.numbers, tuple) else (made.numbers,)
    marked = [
        mapped(arg, lambda leaf: leaf.but(differentiated=True)) if place in numbers else arg
        for place, arg in enumerate(args)
    ]
    replica = machine.replica
    if replica is not None:
        for place in numbers:
            if place < len(args):
                replica.differentiated |= derived([args[place]]).roots
    output = call_callee(machine, made.callee, marked, keywords)
    has_aux = made.has_aux and output.items is not None
    loss = output.items[0] if has_aux and output.items and 0 in output.items else output
    one = Gradient(
        made.spot,
        state=_first_state(machine, args, numbers),
        loss=loss.form,
        division=loss.division,
        inner=loss.reduced,
        seen=_is_seen(made.callee),
    )
    grads = Value(grads=frozenset([one]), roots=derived(args).roots)
    if isinstance(made.numbers, tuple):
        grads = grads.but(items=dict.fromkeys(range(len(numbers)), grads))
    value = output if loss is not output or made.has_aux else output.but(items=None)
    if made.with_value:
        return Value(items={0: value, 1: grads})
    if made.has_aux:
        aux = output.items.get(1, Value()) if output.items else Value()
        return Value(items={0: grads, 1: aux})
    return grads


def _is_seen(callee: Any) -> bool:
    while isinstance(callee, Partial):
        callee = callee.callee
    return isinstance(callee, Function)


def _first_state(machine: "Machine", args: list[Value], numbers: tuple[int, ...]) -> str:
    """Of which rows a gradient is, before anything reduces it."""
    replica = machine.replica
    if replica is None:
        return MEAN
    first = args[numbers[0]] if numbers[0] < len(args) else Value()
    replicated = derived([first]).varies
    if replica.parallel.kind == PMAP:
        return LOCAL
    if replicated is not False:
        # Parameters of which each replica has its own part, or perhaps has.
        return LOCAL if replicated is None and not replica.checks and first.roots else UNKNOWN
    return SUMMED if replica.checks else LOCAL


def reduce(machine: "Machine", value: Value, operation: str, where: Spot) -> Value:
    """`lax.pmean(value)` or `lax.psum(value)` in a replica's function."""

    def one_leaf(leaf: Value) -> Value:
        if operation == "pmean" and leaf.form == MASKED and leaf.division is not None:
            mean_of_means(machine, leaf.division, "devices")
        grads = frozenset(_reduced(machine, one, operation, where) for one in leaf.grads)
        form = leaf.form if operation == "pmean" and leaf.form else SCALED
        synced = leaf.but(grads=grads, updates=frozenset(), varies=False, reduced=True, form=form)
        return synced.but(division=None, callee=None)

    if machine.replica is None:
        return derived([value])
    return mapped(value, one_leaf)


def _reduced(machine: "Machine", one: Gradient, operation: str, where: Spot) -> Gradient:
    if one.loss == MASKED and one.division is not None:
        mean_of_means(machine, one.division, "devices")
    if one.state == SUMMED:
        _check_twice(machine, one, operation, where)
    if one.state == UNKNOWN:
        return one
    after = SUM if operation == "psum" and one.state == LOCAL else MEAN
    return dataclasses.replace(one, state=after)


def _check_twice(machine: "Machine", one: Gradient, operation: str, where: Spot) -> None:
    known = one.seen or bool(one.loss)
    local = not one.inner and one.loss in (AVERAGE, MASKED)
    if operation == "pmean" and local:
        machine.report.add(
            "reduced-twice",
            where,
            "shard_map with check_vma=True (the default) has summed this gradient over the "
            "devices already, so pmean changes nothing: it is N times too large on N devices",
            _TWICE_FIX,
        )
    elif operation == "psum" and known:
        machine.report.add(
            "reduced-twice",
            where,
            "shard_map with check_vma=True (the default) has summed this gradient over the "
            "devices already: psum makes it N times larger on N devices once more",
            "leave this psum out; or " + _TWICE_FIX,
        )


def update(machine: "Machine", before: Value, grads: Value, where: Spot) -> Value:
    """Parameters `before`, moved by `grads`: checks those, and remembers them in the result."""
    used = grads.all_grads
    for one in used:
        _check_scale(machine, one, where)
    old = derived([before])
    updates = old.updates | {(one, where) for one in used}
    return old.but(grads=frozenset(), updates=frozenset(updates), form="")


def update_in_place(machine: "Machine", grads: Value, where: Spot) -> None:
    """The same for an object that holds the parameters itself."""
    for one in grads.all_grads:
        _check_scale(machine, one, where)
        if one.state == LOCAL:
            not_reduced(machine, one, where)


def _check_scale(machine: "Machine", one: Gradient, where: Spot) -> None:
    if one.state == SUM and one.loss == AVERAGE and not one.inner and not machine.rescales:
        machine.report.add(
            "sum-for-mean",
            where,
            "psum adds up the gradients of N local means: the update is N times too large on N "
            "devices",
            "reduce with lax.pmean; or divide by the number of devices, or by the global count of "
            "rows",
        )
    if one.state == SUMMED and one.loss == AVERAGE and not one.inner:
        machine.report.add(
            "reduced-twice",
            where,
            "shard_map with check_vma=True (the default) sums the gradient over the devices, and "
            "the loss is a mean of local rows: the update is N times too large on N devices",
            "differentiate the reduced loss: grad of lax.pmean(loss, axis)",
        )
    if one.accumulated is not None and one.loss == AVERAGE:
        machine.report.add(
            "accumulated-not-divided",
            one.accumulated,
            "the gradients of K micro-batches are added and never divided: the update is K times "
            "too large",
            "divide the sum by the number of micro-batches",
        )
    if one.loss == MASKED and machine.multi_steps and one.division is not None:
        mean_of_means(machine, one.division, "micro-batches")


def not_reduced(machine: "Machine", one: Gradient, where: Spot) -> None:
    """Report parameters that learn from local rows."""
    replica = machine.replica
    kind = replica.parallel.kind if replica is not None else PMAP
    if one.inner and one.loss != TOTAL:
        reason = (
            "the loss is reduced before grad, and its gradient is still of local rows in "
            + ("pmap" if kind == PMAP else "shard_map with check_vma=False")
            + ": replicas drift apart"
        )
    else:
        reason = (
            "no pmean of the gradient before it updates the parameters: every replica learns from "
            "its own rows only, and they drift apart"
        )
    if replica is not None and replica.nameless:
        fix = (
            "give pmap an axis_name and reduce the gradient over it: "
            "grads = jax.lax.pmean(grads, axis_name)"
        )
    else:
        fix = "grads = jax.lax.pmean(grads, axis_name) before the update"
    machine.report.add("no-reduction", where, reason, fix)


def mean_of_means(machine: "Machine", division: Spot, over: str) -> None:
    """Report a loss that is averaged by a local count, then averaged over `over`."""
    each = {"devices": "device", "micro-batches": "micro-batch"}[over]
    if over == "devices":
        fix = (
            "differentiate the local sum, then divide once: grads = psum(grads) / psum(count), "
            "loss = psum(total) / psum(count)"
        )
    else:
        fix = "accumulate the gradient of the sum and the count, and divide once before the update"
    machine.report.add(
        "mean-of-means",
        division,
        f"each {each} divides by the count of its own rows, and the quotients are averaged over "
        f"{over}: a mean of means, wrong wherever the counts differ",
        fix,
    )


def check_result(machine: "Machine", result: Value, specs: Value | None) -> None:
    """What a replica's function returns as equal on all replicas must be."""
    replica = machine.replica
    if replica is None:
        return
    shared = replica.parallel.kind != PMAP
    for leaf, spec in _with_specs(result, specs):
        if shared and spec == "split":
            continue
        for one, where in leaf.updates:
            if one.state == LOCAL:
                not_reduced(machine, one, where)
        if shared and spec == "replicated":
            for one in leaf.grads:
                if one.state == LOCAL and not replica.checks:
                    _returned_local(machine, one)


def _returned_local(machine: "Machine", one: Gradient) -> None:
    machine.report.add(
        "no-reduction",
        one.spot,
        "shard_map returns this gradient as if it were equal on all devices (out_specs P()), and "
        "it is of local rows: with check_vma=False nothing says so",
        "return jax.lax.pmean(grads, axis_name)",
    )


def _with_specs(result: Value, specs: Value | None) -> list[tuple[Value, str]]:
    if specs is None:
        return [(leaf, "") for leaf in result.leaves]
    if specs.items is not None and result.items is not None:
        pairs = []
        for place, item in result.items.items():
            pairs += _with_specs(item, specs.items.get(place, Value()))
        return pairs
    return [(leaf, specs.spec) for leaf in result.leaves]


def hidden(value: Value) -> Value:
    """What a collective that only moves data leaves known of its gradients."""
    return changed_gradients(value, lambda one: dataclasses.replace(one, state=UNKNOWN))
