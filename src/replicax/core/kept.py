"""A function whose backward pass comes later, and the residuals that it keeps until then."""

from collections.abc import Callable
from itertools import compress
from typing import Any

import jax

from replicax.core.equations import only
from replicax.core.leaves import is_random_key, numbers
from replicax.core.models.definition import PyTree
from replicax.core.row_rules import MIXED
from replicax.core.rows import follow

Arrays = list[jax.Array]


class Later:
    """A function whose forward and backward pass run in different turns of a compiled loop.

    `function(wanted, given) -> (outputs, more)` is differentiated with respect to `wanted` and the
    floats in `given`, inputs that change from turn to turn; `more` is auxiliary. Only residuals
    that depend on `given` are kept. Those that follow from the parameters alone, such as their
    casts and transposes, are the same in every turn, and recomputed.
    """

    def __init__(
        self, function: Callable[[PyTree, Any], tuple[Any, Any]], wanted: PyTree, given: PyTree
    ) -> None:
        self._vjp: Any = None
        self._result: Any

        def forward(wanted: PyTree, given: PyTree) -> Any:
            outputs, vjp, more = jax.vjp(function, wanted, given, has_aux=True)
            kept, self._vjp = jax.tree.flatten(vjp)
            return (outputs, more), kept

        closed, found = jax.make_jaxpr(forward, return_shape=True)(wanted, given)
        outputs, kept = found
        self._result = jax.tree.structure(outputs)
        count, params = self._result.num_leaves, len(jax.tree.leaves(wanted))
        places = follow(closed, [None] * params + [MIXED] * len(jax.tree.leaves(given)))
        self._changes = [place is not None for place in places[count:]]
        self._keys = [
            jax.random.key_impl(leaf) if is_random_key(leaf) else None
            for leaf, changes in zip(kept, self._changes, strict=True)
            if changes
        ]
        self._forward, self._reads = only(closed, [True] * count + self._changes)
        self._again, self._reads_again = only(
            closed, [False] * count + [not changes for changes in self._changes]
        )

    def forward(self, wanted: PyTree, given: PyTree) -> tuple[tuple[Any, Any], Arrays]:
        """Return `(outputs, more)` and the residuals to keep, random keys as numbers."""
        found = self._forward(*compress(jax.tree.leaves((wanted, given)), self._reads))
        count = self._result.num_leaves
        kept = [numbers(leaf) for leaf in found[count:]]
        return jax.tree.unflatten(self._result, found[:count]), kept

    def backward(self, wanted: PyTree, kept: Arrays, cotangents: Any) -> tuple[PyTree, Any]:
        """Return the cotangents of `wanted` and `given`, from those of `outputs`."""
        restored = iter(
            leaf if impl is None else jax.random.wrap_key_data(leaf, impl=impl)
            for leaf, impl in zip(kept, self._keys, strict=True)
        )
        again = iter(self._again(*compress(jax.tree.leaves(wanted), self._reads_again)))
        leaves = [next(restored if changes else again) for changes in self._changes]
        found: tuple[PyTree, Any] = jax.tree.unflatten(self._vjp, leaves)(cotangents)
        return found
