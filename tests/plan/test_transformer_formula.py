"""The example of a GPT with 300 million parameters on 8 V100 of 32 GB: on paper, and counted."""

from itertools import count
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from support.tiers import EXHAUSTIVE

import replicax as rx
from replicax.core.placement.mesh import abstract_mesh
from replicax.plan.memory_formula import Transformer, memory_formula
from replicax.recipes import transformer
from replicax.recipes.gpt2 import GPT2

DEVICES = 8
V100_BYTES = 32 * 10**9
PARAMETER_BYTES = 4 * 300 * 10**6
EXAMPLE = Transformer(tokens=1024, heads=8, head_dim=128)


def test_the_example_takes_four_times_what_the_formula_gives() -> None:
    found = EXAMPLE.on_paper(PARAMETER_BYTES, V100_BYTES)
    assert found.bytes_per_row == pytest.approx(2.4e9)
    assert found.rows == (V100_BYTES - PARAMETER_BYTES) // 2_400_000_000
    assert EXAMPLE.on_paper(PARAMETER_BYTES, PARAMETER_BYTES - 1).rows == 0
    assert (V100_BYTES - PARAMETER_BYTES) // int(4 * found.bytes_per_row) == 3  # and 24 in all


@EXHAUSTIVE
def test_counted_the_state_is_in_the_way_and_scores_are_stored_more_than_once() -> None:
    shape = transformer.Shape(layers=20, heads=8, width=1024, context=1024, vocab_size=50257)
    model = jax.eval_shape(lambda: transformer.init(shape, jax.random.key(0)))
    loss = GPT2(heads=shape.heads, context=shape.context, remat="none").loss
    dp = rx.DataParallel(loss, optax.adamw(1e-3), mesh=rx.make_mesh(1))
    dp = dp.replace(mesh=abstract_mesh(DEVICES))

    def counted(rows: int) -> Any:
        a_row = jax.ShapeDtypeStruct((rows * DEVICES,), jnp.int32)
        tokens = jax.ShapeDtypeStruct((rows * DEVICES, shape.context + 1), jnp.uint16)
        batch = {"tokens": tokens, "length": a_row, "bytes": a_row}
        return memory_formula(dp, model, batch, platform="cuda")

    one, two = counted(1), counted(2)
    assert one.parameters == pytest.approx(PARAMETER_BYTES, rel=0.02)
    # Parameters and the two moments of AdamW; and the gradient.
    assert one.state == pytest.approx(3 * one.parameters, rel=1e-6)
    assert one.gradient == one.parameters
    per_row = two.total - one.total
    scores = 4 * shape.layers * shape.heads * shape.context**2
    assert 3 * scores < per_row
    rows = next(rows for rows in count(1) if counted(rows + 1).total > V100_BYTES)
    assert counted(rows).total <= V100_BYTES < counted(rows + 1).total
    # Between the example's 3, and the 13 that its formula has room for.
    assert 3 < rows < V100_BYTES // 2_400_000_000
