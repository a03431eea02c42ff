"""Deal matrices to owners: which has which, and where they are in arrays of slots.

Five matrices of 8 x 2 and of 2 x 8, and two owners:

    leaves     a [3, 8, 2], a stack; b [2, 8]; c [8, 2]
    group      all have 16 entries: matrices 0 to 2 are of a, 3 is b, 4 is c
    slots      owner 0: 0, 1, 4    owner 1: 2, 3, none
    order      0, 1, 4, 2, 3, 5: the matrix of each slot, and 5 for none
"""

import dataclasses
import math
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax


@dataclasses.dataclass(frozen=True)
class MatrixDims:
    """The dims of a leaf that are the rows and the columns of its matrices; others are a stack."""

    rows: tuple[int, ...]
    columns: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class MatrixForm:
    """How the entries of a matrix follow one another."""

    shape: tuple[int, int]
    """Rows and columns."""
    sizes: tuple[int, ...]
    """Sizes of the dims of the leaf, rows first."""
    spreads: bool = False
    """Whether the largest dim is outermost: a layout splits it, so that equal parts of the entries
    are then where the parts of the leaf are."""

    @property
    def order(self) -> list[int]:
        """The dims, from the outermost."""
        dims = list(range(len(self.sizes)))
        if self.spreads:
            dims.sort(key=self.sizes.index(max(self.sizes)).__ne__)
        return dims

    def matrix(self, entries: jax.Array) -> jax.Array:
        """Return `[rows, columns]`."""
        apart = entries.reshape([self.sizes[dim] for dim in self.order])
        return apart.transpose(np.argsort(self.order)).reshape(self.shape)

    def entries(self, matrix: jax.Array) -> jax.Array:
        """Return `[rows * columns]`."""
        return matrix.reshape(self.sizes).transpose(self.order).reshape(-1)


@dataclasses.dataclass(frozen=True)
class MatrixStack:
    """The matrices of one leaf."""

    leaf_shape: tuple[int, ...]
    dtype: Any
    dims: MatrixDims
    spreads: bool = False

    @cached_property
    def form(self) -> MatrixForm:
        rows, columns = self.dims.rows, self.dims.columns
        sizes = [self.leaf_shape[dim] for dim in (*rows, *columns)]
        shape = math.prod(sizes[: len(rows)]), math.prod(sizes[len(rows) :])
        return MatrixForm(shape, tuple(sizes), self.spreads)

    @property
    def count(self) -> int:
        return math.prod(self.leaf_shape) // math.prod(self.form.shape)

    @cached_property
    def _order(self) -> tuple[int, ...]:
        own = (*self.dims.rows, *self.dims.columns)
        stacked = [dim for dim in range(len(self.leaf_shape)) if dim not in own]
        return (*stacked, *(own[at] for at in self.form.order))

    def apart(self, leaf: jax.Array) -> jax.Array:
        """Return the matrices of a leaf, `[count, entries]`."""
        return leaf.transpose(self._order).reshape(self.count, -1)

    def together(self, matrices: jax.Array) -> jax.Array:
        """Return the leaf of `[count, entries]`."""
        stacked = matrices.reshape([self.leaf_shape[dim] for dim in self._order])
        return stacked.transpose(np.argsort(self._order))


@dataclasses.dataclass(frozen=True)
class MatrixGroup:
    """Matrices with equally many entries, and states with equally many, which share slots."""

    leaves: tuple[int, ...]
    """Which leaves have them."""
    order: tuple[int, ...]
    """The matrix in each slot, counted through the leaves; the number of matrices if none."""
    kinds: tuple[int, ...]
    """The form of the matrix in each slot, an index of `forms`; their number if none."""
    forms: tuple[MatrixForm, ...]
    dtype: Any

    @property
    def is_in_order(self) -> bool:
        every = len(self.forms) not in self.kinds
        return every and self.order == tuple(range(len(self.order)))

    def slots(self, matrices: list[jax.Array]) -> jax.Array:
        """Return the matrices of all leaves in their slots, `[slots, entries]`, 0 where none is."""
        mine = jnp.concatenate([matrices[at] for at in self.leaves])
        if self.is_in_order:
            return mine
        return jnp.concatenate([mine, jnp.zeros_like(mine[:1])])[np.array(self.order)]

    def matrices(self, slots: jax.Array, stacks: Sequence[MatrixStack]) -> dict[int, jax.Array]:
        """Return the matrices of each leaf, by its number."""
        counts = [stacks[at].count for at in self.leaves]
        if not self.is_in_order:
            slots = slots[np.argsort(self.order)[: sum(counts)]]
        cuts = np.cumsum([0, *counts])
        return {at: slots[cuts[n] : cuts[n + 1]] for n, at in enumerate(self.leaves)}


def dealt_matrices(
    transform: optax.GradientTransformation, stacks: Sequence[MatrixStack], owners: int
) -> tuple[MatrixGroup, ...]:
    """Deal the matrices of `stacks` to `owners`: of each group equally many to each.

    What is left over goes to the owners with the least work so far, costliest groups first.
    """
    groups: dict[Any, list[int]] = {}
    for at, stack in enumerate(stacks):
        matrix = jax.ShapeDtypeStruct(stack.form.shape, stack.dtype)
        leaves, structure = jax.tree.flatten(jax.eval_shape(transform.init, matrix))
        sizes = [(math.prod(leaf.shape), leaf.dtype) for leaf in leaves]
        key = structure, math.prod(stack.form.shape), stack.dtype, *sizes
        groups.setdefault(key, []).append(at)
    load, found = [0] * owners, []
    for group in sorted(groups.values(), key=lambda group: -cost(stacks[group[0]].form.shape)):
        forms = [stacks[at].form for at in group for _ in range(stacks[at].count)]
        each, left = divmod(len(forms), owners)
        more = sorted(range(owners), key=load.__getitem__)[:left]
        counts = [each + (owner in more) for owner in range(owners)]
        rest, slots, order = iter(range(len(forms))), max(counts), list[int]()
        for owner, count in enumerate(counts):
            own = [next(rest) for _ in range(count)]
            load[owner] += sum(cost(forms[at].shape) for at in own)
            order += [*own, *[len(forms)] * (slots - count)]
        distinct = tuple(dict.fromkeys(forms))
        kind = [*map(distinct.index, forms), len(distinct)]
        kinds, dtype = tuple(kind[at] for at in order), stacks[group[0]].dtype
        found.append(MatrixGroup(tuple(group), tuple(order), kinds, distinct, dtype))
    return tuple(found)


def cost(shape: tuple[int, int]) -> int:
    """Return what the products of a matrix cost, up to a factor: Newton-Schulz's, or a root's."""
    return max(shape) * min(shape) ** 2
