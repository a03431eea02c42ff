"""The example in the docstring of `split_trace`: what is cut where."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from replicax.core.modes.exact.micro_shard_primitives import sum_all
from replicax.core.modes.exact.split_trace import Cut, Segment, split_trace
from replicax.core.placement.mesh import ShardDim
from replicax.core.step.reduction import REDUCTIONS

SCALAR, ROWS = jax.ShapeDtypeStruct((), np.float32), jax.ShapeDtypeStruct((2,), np.float32)
NUMBER = jax.ShapeDtypeStruct((), np.int32)


def total(value: jax.Array) -> jax.Array:
    [found] = sum_all([value], wire=REDUCTIONS["float32"], sent=[True], shard_dims=[None], count=4)
    return found


def cut_step(step: Any, into: list[ShardDim], results: int, *shapes: jax.ShapeDtypeStruct) -> Cut:
    return split_trace(jax.make_jaxpr(step)(*shapes), into, [None] * results)


def segments(found: Cut) -> list[tuple[bool, list[str], int, int]]:
    """Whether each segment is own, its primitives, and its numbers of arguments and sums."""
    assert all(isinstance(item, Segment) for item in found.items)
    return [
        (item.own, [eqn.primitive.name for eqn in item.jaxpr.eqns], len(item.jaxpr.invars), sums)
        for item in found.items
        if isinstance(item, Segment)
        for sums in [len(item.sums)]
    ]


def test_one_sum_makes_two_segments() -> None:
    def step(w: jax.Array, x: jax.Array) -> jax.Array:
        each = x * jnp.tanh(w)
        return w * 0.9 - total(each.sum())

    found = cut_step(step, [None, 0], 1, SCALAR, ROWS)
    assert segments(found) == [
        (True, ["tanh", "mul", "reduce_sum", "of_micro_shard"], 2, 1),
        (False, ["mul", "sub"], 2, 0),
    ]
    weight, rows = found.jaxpr.invars
    assert found.unneeded[0] == (rows,)
    assert weight in found.unneeded[1]


def test_a_shared_value_with_two_readers_has_its_own_segment_and_an_integer_has_none() -> None:
    def step(w: jax.Array, n: jax.Array, x: jax.Array) -> list[jax.Array]:
        scale, k = jnp.tanh(w), n + 1
        each = x * scale * k
        return [w * 0.9 - total(each.sum()), scale * k]

    shared, own, last = segments(cut_step(step, [None, None, 0], 2, SCALAR, NUMBER, ROWS))
    assert shared == (False, ["tanh"], 1, 0)
    assert own[0]
    assert own[2:] == (3, 1)
    assert last[2:] == (4, 0)
    assert "add" in own[1]
    assert "add" in last[1]
