"""Optimizers that need whole matrices: each matrix has one owner, which keeps its state.

An elementwise update can be done in any pieces. One that multiplies matrices, such as Muon's, needs
whole ones; if every replica did all of them, the work would be repeated on each. So the matrices
are dealt to a fixed number of owners, of which each device has equally many, and the state has one
slot for each: `[owners * slots, ...]`, split along dim 0. Which owner a matrix has depends neither
on devices nor on the layout.

A step exchanges pieces of gradients for whole ones, each where its owner is, and updates one after
another: a batched product has other bits. Then it takes the updates to where they are needed.
"""

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jax.sharding import PartitionSpec

from replicax.core.ground.leaves import PyTree
from replicax.core.ground.train_state import Owned
from replicax.core.placement.matrix_slots import (
    MatrixDims,
    MatrixForm,
    MatrixGroup,
    MatrixStack,
    dealt_matrices,
)
from replicax.core.placement.mesh import AnyMesh

Through = Callable[[jax.Array], jax.Array]


def _unmoved(slots: jax.Array) -> jax.Array:
    return slots


@dataclass(frozen=True)
class Moves:
    """How `[slots, entries]` of a group get to owners and back."""

    own: Through = _unmoved
    """Takes the part of the slots that are its own, of those that each device has."""
    gradients: Through = _unmoved
    params: Through = _unmoved
    updates: Through = _unmoved
    """Takes what owners have updated back to all, or to those that have a part of the entries."""


Programs = dict[tuple[tuple[int, int], Any], tuple[ClosedJaxpr, Any]]


@dataclass(frozen=True)
class OwnersWork:
    """The update of the matrices of some leaves by their owners."""

    transform: optax.GradientTransformation
    """The optimizer of one matrix."""
    stacks: tuple[MatrixStack, ...]
    groups: tuple[MatrixGroup, ...]

    def spread(self) -> "OwnersWork":
        """Return the same work on entries in the order in which a layout splits them."""
        each = partial(replace, spreads=True)
        groups = (replace(group, forms=(*map(each, group.forms),)) for group in self.groups)
        return replace(self, stacks=(*map(each, self.stacks),), groups=(*groups,))

    def init(self, params: list[jax.Array]) -> list[PyTree]:
        """Return the first state of each group."""
        apart = self.apart(params)

        def of_form(form: MatrixForm, slots: jax.Array) -> PyTree:
            return jax.vmap(lambda entries: self.transform.init(form.matrix(entries)))(slots)

        def first(group: MatrixGroup) -> PyTree:
            slots, kinds = group.slots(apart), np.array(group.kinds)
            found = of_form(group.forms[0], slots)
            for kind, form in enumerate(group.forms[1:], 1):
                own = (kinds == kind).nonzero()[0]
                found = jax.tree.map(
                    lambda leaf, new, own=own: leaf.at[own].set(new.reshape(-1, *leaf.shape[1:])),
                    *(found, of_form(form, slots[own])),
                )
            return found

        return list(map(first, self.groups))

    def programs(self, gradients: list[jax.Array]) -> Programs:
        """Return the traced update of each kind of matrix, with what it closes over as constants.

        By shape and dtype of the gradient.
        """
        found: Programs = {}
        for group in self.groups:
            dtype = gradients[group.leaves[0]].dtype
            for form in group.forms:
                matrix = jax.ShapeDtypeStruct(form.shape, group.dtype)
                state = jax.eval_shape(self.transform.init, matrix)
                given = matrix.update(dtype=dtype), state, matrix
                traced = jax.make_jaxpr(self.transform.update, return_shape=True)(*given)
                found[form.shape, dtype] = traced[0], jax.tree.structure(traced[1])
        return found

    def by_programs(self, programs: Programs, outside: list[jax.Array]) -> "OwnersWork":
        """Return the same work by `programs`, whose constants, one after another, are `outside`."""
        rest, closed = iter(outside), dict[Any, Any]()
        for key, (program, structure) in programs.items():
            own = list(itertools.islice(rest, len(program.consts)))
            closed[key] = jaxpr_as_fun(ClosedJaxpr(program.jaxpr, own)), structure

        def update(gradient: jax.Array, state: PyTree, params: Any = None) -> tuple[Any, PyTree]:
            function, structure = closed[gradient.shape, gradient.dtype]
            found = function(*jax.tree.leaves((gradient, state, params)))
            return jax.tree.unflatten(structure, found)  # type: ignore[no-any-return]

        return replace(self, transform=optax.GradientTransformation(self.transform.init, update))

    def __call__(
        self,
        gradients: list[jax.Array],
        params: list[jax.Array],
        states: list[PyTree],
        moves: Moves = Moves(),
    ) -> tuple[list[jax.Array], list[PyTree]]:
        """Return the updates of leaves, and the states of the groups."""
        updates, states = self.update(self.apart(gradients), self.apart(params), states, moves)
        return self.together(updates), states

    def apart(self, leaves: list[jax.Array]) -> list[jax.Array]:
        """Return the matrices of each leaf, `[count, entries]`."""
        return [stack.apart(leaf) for stack, leaf in zip(self.stacks, leaves, strict=True)]

    def together(self, matrices: list[jax.Array]) -> list[jax.Array]:
        """Return the leaves."""
        return [stack.together(each) for stack, each in zip(self.stacks, matrices, strict=True)]

    def update(
        self,
        gradients: list[jax.Array],
        params: list[jax.Array],
        states: list[PyTree],
        moves: Moves,
    ) -> tuple[list[jax.Array], list[PyTree]]:
        """Return the updates of the matrices of each leaf, and the states."""
        found: dict[int, jax.Array] = {}
        after = []
        for group, state in zip(self.groups, states, strict=True):
            kinds = moves.own(jnp.array(group.kinds, jnp.int32))
            given = moves.gradients(group.slots(gradients)), moves.params(group.slots(params))
            updates, state = self._slot_by_slot(group, kinds, *given, state)
            found |= group.matrices(moves.updates(updates), self.stacks)
            after.append(state)
        return [found[at] for at in range(len(self.stacks))], after

    def _slot_by_slot(
        self,
        group: MatrixGroup,
        kinds: jax.Array,
        gradients: jax.Array,
        params: jax.Array,
        state: Any,
    ) -> tuple[jax.Array, PyTree]:
        alone: Callable[[Any], Any] = lax.optimization_barrier

        def of_form(form: MatrixForm, gradient: jax.Array, params: jax.Array, state: Any) -> Any:
            matrix = jax.ShapeDtypeStruct(form.shape, group.dtype)
            shapes = jax.eval_shape(self.transform.init, matrix)
            before = jax.tree.map(lambda leaf, like: leaf.reshape(like.shape), state, shapes)
            given = form.matrix(gradient), before, form.matrix(params)
            # It has the bits that it has by itself: nothing around it is fused with it.
            update, after = alone(self.transform.update(*alone(given)))
            back = jax.tree.map(lambda leaf, like: leaf.reshape(like.shape), after, state)
            return form.entries(update), back

        def none(gradient: jax.Array, params: jax.Array, state: Any) -> Any:
            update, after = jax.eval_shape(branches[0], gradient, params, state)
            same = jax.tree.map(lambda leaf, like: leaf.astype(like.dtype), state, after)
            return jnp.zeros(update.shape, update.dtype), same

        branches: list[Any] = [partial(of_form, form) for form in group.forms]
        if len(group.forms) in group.kinds:
            branches.append(none)
        found: tuple[jax.Array, PyTree] = lax.map(
            lambda slot: lax.switch(slot[0], branches, *slot[1:]), (kinds, gradients, params, state)
        )
        return found


Perform = Callable[
    [OwnersWork, list[jax.Array], list[jax.Array], list[PyTree]],
    tuple[list[jax.Array], list[PyTree]],
]
"""Does some `OwnersWork` on gradients, parameters and states."""

_performer: ContextVar[Perform] = ContextVar("replicax_owners", default=OwnersWork.__call__)


@contextlib.contextmanager
def performing(perform: Perform) -> Iterator[None]:
    """Enter a context in which the work of owners is done by `perform`."""
    token = _performer.set(perform)
    try:
        yield
    finally:
        _performer.reset(token)


def on_mesh(
    mesh: AnyMesh,
    axis: str,
    whole: bool,
    work: OwnersWork,
    gradients: list[jax.Array],
    params: list[jax.Array],
    states: list[PyTree],
) -> tuple[list[jax.Array], list[PyTree]]:
    """Do `work` on the devices along `axis`; `whole`: whether each has all parameters."""
    devices, work = mesh.shape[axis], work.spread()
    owners, in_parts, everywhere = (PartitionSpec(*axes) for axes in ([axis], [None, axis], []))

    def own(slots: jax.Array) -> jax.Array:
        each = len(slots) // devices
        return lax.dynamic_slice_in_dim(slots, lax.axis_index(axis) * each, each)

    exchanged = partial(lax.all_to_all, axis_name=axis, tiled=True)
    collect: Through = partial(exchanged, split_axis=0, concat_axis=1)
    back: Through = partial(exchanged, split_axis=1, concat_axis=0)
    if any(math.prod(group.forms[0].shape) % devices for group in work.groups):
        collect, in_parts, whole = own, everywhere, True  # a matrix has no equal parts
    if whole:
        back = partial(lax.all_gather, axis_name=axis, tiled=True)
    where = everywhere if whole else in_parts
    found, after = jax.shard_map(
        partial(work.update, moves=Moves(own, collect, own if whole else collect, back)),
        mesh=mesh,
        in_specs=(in_parts, where, owners),
        out_specs=(where, owners),
        check_vma=False,
    )(work.apart(gradients), work.apart(params), states)
    return work.together(found), after


def by_owner(
    transform: optax.GradientTransformation,
    dims: Callable[[PyTree], Sequence[MatrixDims]],
    *,
    owners: int = 8,
) -> optax.GradientTransformation:
    """Return an optimizer that applies `transform` to each matrix of each leaf.

    Args:
        transform: an optimizer of one array `[rows, columns]`.
        dims: which dims of the leaves of a tree are those of matrices, leaf by leaf.
        owners: number of owners; a layout that splits them needs a divisor as number of devices.
    """

    def work_of(tree: PyTree) -> OwnersWork:
        leaves = jax.tree.leaves(tree)
        stacks = tuple(
            MatrixStack(tuple(leaf.shape), leaf.dtype, each)
            for leaf, each in zip(leaves, dims(tree), strict=True)
        )
        return OwnersWork(transform, stacks, dealt_matrices(transform, stacks, owners))

    def init(params: PyTree) -> Owned:
        leaves, work = jax.tree.leaves(params), work_of(params)
        slots = jax.eval_shape(lambda: [group.slots(work.apart(leaves)) for group in work.groups])
        sizes = (sum(each.size * each.dtype.itemsize for each in some) for some in (leaves, slots))
        return Owned(work.init(leaves), owners, *sizes)

    def update(gradient: PyTree, state: Owned, params: PyTree = None) -> tuple[PyTree, Owned]:
        if params is None:
            raise ValueError("params are needed: call update(gradient, state, params)")
        leaves, structure = jax.tree.flatten(gradient)
        given = leaves, jax.tree.leaves(params), state.values
        updates, after = _performer.get()(work_of(params), *given)
        return jax.tree.unflatten(structure, updates), replace(state, values=after)

    return optax.GradientTransformation(init, update)
