"""The example in the docstring of `sharded_update`: what is computed on a piece."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import ClosedJaxpr

from replicax.core.modes.exact.micro_shard_primitives import gather_p
from replicax.core.modes.exact.sharded_update import LooksAtWhole, MicroShard, by_pieces
from replicax.core.modes.exact.split_trace import Exchange, Segment, split_trace
from replicax.core.placement.mesh import ShardDim

COUNT = 4
WHOLE, PIECE = (jax.ShapeDtypeStruct((size,), np.float32) for size in (8, 2))
INTO: list[ShardDim] = [None, 0, 0]


def traced(apply: Callable[..., Any], out: Sequence[ShardDim]) -> ClosedJaxpr:
    """`apply(w, m, g)` on a piece of `m` and `g`, with its number."""

    def of_piece(number: jax.Array, *arrays: jax.Array) -> Any:
        return by_pieces(apply, INTO, out, MicroShard(number, COUNT))(*arrays)

    number = jax.ShapeDtypeStruct((), np.int32)
    return jax.make_jaxpr(of_piece)(number, WHOLE, PIECE, PIECE)


def update(w: jax.Array, m: jax.Array, g: jax.Array) -> tuple[jax.Array, jax.Array]:
    norm = jnp.sqrt(jnp.sum(g * g))
    m = m * 0.9 + g / norm
    return w * 0.99 - m, m


def test_a_norm_is_gathered_once_and_the_rest_computed_on_a_piece() -> None:
    found = split_trace(traced(update, [None, 0]), [0, *INTO], [None, 0])
    norm, squares, rest, weights = found.items
    assert isinstance(norm, Segment)
    assert isinstance(rest, Segment)
    assert norm.own
    assert rest.own
    for item, shape in ((squares, (COUNT,)), (weights, WHOLE.shape)):
        assert isinstance(item, Exchange)
        [eqn] = item.eqns
        assert eqn.primitive is gather_p
        assert eqn.outvars[0].aval.shape == shape
    # The whole product of the weights is dead code.
    shapes = {eqn.outvars[0].aval.shape for eqn in rest.jaxpr.eqns}
    assert shapes == {(), PIECE.shape}


def test_whole_results_of_a_cond_do_not_depend_on_the_piece() -> None:
    def skipping(_w: jax.Array, m: jax.Array, g: jax.Array) -> Any:
        total = jnp.sum(g)
        nothing = jnp.zeros_like(m), total * 0
        return lax.cond(jnp.isfinite(total), lambda: (m + g, total), lambda: nothing)

    found = split_trace(traced(skipping, [0, None]), [0, *INTO], [0, None])
    owned = [item.own for item in found.items if isinstance(item, Segment)]
    assert owned == [True, False, True]
    pieces, total = found.jaxpr.outvars
    assert pieces in found.shard_dims
    assert total not in found.shard_dims


@pytest.mark.parametrize(
    ("apply", "primitive"),
    [
        (lambda w, m, _: (w, jnp.sort(m)), "sort"),
        (lambda w, m, g: (w, m * (g @ g)), "dot_general"),
        (lambda w, m, _: (w, m.at[0].set(0.0)), "scatter"),
    ],
)
def test_other_uses_of_a_whole_array_are_refused(apply: Callable[..., Any], primitive: str) -> None:
    with pytest.raises(LooksAtWhole, match=primitive):
        traced(apply, [None, 0])
