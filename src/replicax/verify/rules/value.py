"""What is known of a value without running the code."""

import ast
import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from replicax.verify.rules.finding import Spot

LOCAL, MEAN, SUM, SUMMED, UNKNOWN = "local", "mean", "sum", "summed", "unknown"
"""Of a gradient: of this replica's rows; after pmean; after psum; summed over the replicas by
differentiation itself (shard_map that checks replication); and what cannot be told."""
_BEST = (MEAN, SUM, UNKNOWN, SUMMED, LOCAL)
AVERAGE, TOTAL, MASKED, SCALED = "average", "total", "masked", "scaled"
"""Of a loss: mean of the rows, their sum, sum(loss * mask) / sum(mask), and one of these times
something that is not a constant of the code."""


_MOST_LEAVES = 48
_MOST_ROOTS = 24


@dataclasses.dataclass(frozen=True)
class Gradient:
    """One gradient, from the line that takes it to the line that uses it."""

    spot: Spot
    state: str = LOCAL
    loss: str = ""
    """Form of the loss; empty where it cannot be told."""
    division: Spot | None = None
    """Where a masked loss divides by the mask's sum."""
    inner: bool = False
    """The loss was reduced over the replicas before it was differentiated."""
    seen: bool = False
    """The loss function is in this file."""
    accumulated: Spot | None = None
    """Where it was added to that of another micro-batch, as long as nothing divides."""


@dataclasses.dataclass(frozen=True)
class Value:
    """What is known of one value; every field says nothing by default."""

    grads: frozenset[Gradient] = frozenset()
    """The gradients that this is, or is linear in."""
    updates: frozenset[tuple[Gradient, Spot]] = frozenset()
    """The gradients that went into these parameters, and where."""
    varies: bool | None = None
    """Whether replicas hold different values."""
    roots: frozenset[str] = frozenset()
    """The arguments of the step it depends on, as `batch.mask`."""
    form: str = ""
    division: Spot | None = None
    reduced: bool = False
    differentiated: bool = False
    size: bool = False
    """A number of rows, or of something else: a shape, a len()."""
    devices: bool = False
    """The number of devices."""
    key: bool = False
    """A PRNG key."""
    shape_of: frozenset[str] = frozenset()
    loops: frozenset[int] = frozenset()
    """The loops each turn of which makes it anew by a step on the devices."""
    stacked: str = ""
    """"stacked" on the replicas' axis, as pmap returns it, or "single" where out_axes is None."""
    opaque: bool = False
    """Perhaps a tuple of outputs, perhaps one."""
    items: Mapping[Any, "Value"] | None = dataclasses.field(default=None, compare=False)
    callee: Any = dataclasses.field(default=None, compare=False)
    instance: str = ""
    """Class of the file that it is an instance of."""
    constant: Any = None
    name: str = ""
    """Canonical name: `jax.lax.pmean`."""
    target: str = ""
    """The loop variable that it is, or was made of."""
    spec: str = ""
    """Of a PartitionSpec or sharding: "replicated" or "split"."""
    mesh: bool = False

    def but(self, **changes: Any) -> "Value":
        """A copy with some fields changed."""
        return dataclasses.replace(self, **changes)

    @property
    def leaves(self) -> list["Value"]:
        """The items, or itself where it has none."""
        if self.items is None:
            return [self]
        return [leaf for item in self.items.values() for leaf in item.leaves]

    @property
    def all_grads(self) -> frozenset[Gradient]:
        """Its gradients and those of its items."""
        return self.grads.union(*(leaf.grads for leaf in self.leaves))


NOTHING = Value()


def packed(items: Mapping[Any, Value], **known: Any) -> Value:
    """A tuple or dictionary of `items`; one that grows without end becomes one value."""
    value = Value(items=items, **known)
    if len(value.leaves) > _MOST_LEAVES:
        return derived(items.values()).but(**known)
    return value


def varies(values: Iterable[Value]) -> bool | None:
    """Whether what depends on `values` differs between replicas."""
    known = {value.varies for value in values}
    return True if True in known else None if None in known else False


def derived(values: Iterable[Value]) -> Value:
    """What depends on `values` in a way that keeps gradients, as an element-wise function."""
    each = [leaf for value in values for leaf in value.leaves]
    if not each:
        return Value(varies=False)
    roots = frozenset().union(*(value.roots for value in each))
    if len(roots) > _MOST_ROOTS:
        roots = frozenset(root.partition(".")[0] for root in roots)
    targets = [value.target for value in each if value.target]
    return Value(
        grads=frozenset().union(*(value.grads for value in each)),
        updates=frozenset().union(*(value.updates for value in each)),
        varies=varies(each),
        roots=roots,
        reduced=any(value.reduced for value in each),
        differentiated=any(value.differentiated for value in each),
        loops=frozenset().union(*(value.loops for value in each)),
        target=targets[0] if targets else "",
    )


def unknown(values: Iterable[Value]) -> Value:
    """The result of a function that cannot be seen: it may have reduced what it was given."""
    value = derived(values)
    hidden = frozenset(dataclasses.replace(one, state=UNKNOWN) for one in value.grads)
    return value.but(grads=hidden, updates=frozenset(), loops=frozenset())


def without_gradient(value: Value) -> Value:
    """The same data, of which nobody would say it is a gradient: a norm, a mean, a sign."""
    return value.but(grads=frozenset(), updates=frozenset())


def mapped(value: Value, change: Callable[[Value], Value]) -> Value:
    """`change` of every leaf."""
    if value.items is None:
        return change(value)
    items = {key: mapped(item, change) for key, item in value.items.items()}
    return value.but(items=items)


def changed_gradients(value: Value, change: Callable[[Gradient], Gradient]) -> Value:
    """`value` with `change` of each of its gradients."""
    return mapped(value, lambda leaf: leaf.but(grads=frozenset(map(change, leaf.grads))))


def merged(first: Value, second: Value) -> Value:
    """What is known after one of two branches: where they differ, the one no rule speaks of."""
    if first == second and first.items == second.items and first.callee is second.callee:
        return first
    if (
        first.items is not None
        and second.items is not None
        and set(first.items) == set(second.items)
    ):
        items = {key: merged(first.items[key], second.items[key]) for key in first.items}
        return derived([first, second]).but(items=items)
    best: dict[Spot, Gradient] = {}
    for one in (*first.grads, *second.grads):
        other = best.setdefault(one.spot, one)
        better = min(one, other, key=lambda grad: _BEST.index(grad.state))
        both = one.accumulated and other.accumulated
        best[one.spot] = dataclasses.replace(better, accumulated=both or None)
    spots = {spot: grad for grad, spot in (*first.updates, *second.updates)}
    for grad, spot in (*first.updates, *second.updates):
        if _BEST.index(grad.state) < _BEST.index(spots[spot].state):
            spots[spot] = grad
    richer = first if first.callee is not None or first.items is not None else second
    same = first.form == second.form
    return derived([first, second]).but(
        grads=frozenset(best.values()),
        updates=frozenset((grad, spot) for spot, grad in spots.items()),
        form=first.form if same else "",
        division=first.division if same else None,
        key=first.key or second.key,
        stacked=first.stacked if first.stacked == second.stacked else "",
        opaque=first.opaque and second.opaque,
        callee=richer.callee,
        items=richer.items,
        name=first.name if first.name == second.name else "",
        spec=first.spec if first.spec == second.spec else "",
        mesh=first.mesh and second.mesh,
        instance=first.instance or second.instance,
    )


@dataclasses.dataclass(frozen=True)
class Function:
    """A function of the file, with the scope it was made in."""

    node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
    scope: Any
    owner: str = ""
    """Class whose method it is."""
    receiver: Value | None = None
    loop: int = 0
    """The loop that makes it anew at each turn, or 0."""


@dataclasses.dataclass(frozen=True)
class Known:
    """A function of a library, by its canonical name."""

    name: str


@dataclasses.dataclass(frozen=True)
class Partial:
    """functools.partial of a callee."""

    callee: Any
    args: tuple[Value, ...]
    keywords: Mapping[str, Value]
    loop: int = 0


@dataclasses.dataclass(frozen=True)
class Differentiated:
    """grad or value_and_grad of a callee."""

    callee: Any
    with_value: bool
    has_aux: bool
    numbers: tuple[int, ...] | int
    spot: Spot
    loop: int = 0


@dataclasses.dataclass(frozen=True)
class Made:
    """A class of the file."""

    name: str


@dataclasses.dataclass(frozen=True)
class Method:
    """A method of a value that the file does not define."""

    receiver: Value
    name: str
