"""The places of the largest values, against those of `lax.top_k`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from replicax.core.ground.largest_places import largest_places

ROWS, SIZE, KEPT = 24, 4096, 64


def rows(kind: str) -> np.ndarray:
    draw = np.random.default_rng(0)
    normal, shape = draw.standard_normal((ROWS, SIZE)), (ROWS, SIZE)
    return {
        "normal": normal,
        "equal": np.ones(shape),
        "zero": np.zeros(shape),
        "few values": draw.integers(0, 3, shape),
        "many equal": draw.integers(0, 40, shape),
        "mostly zero": np.where(draw.random(shape) < 0.01, normal, 0),
        "infinite": np.where(draw.random(shape) < 0.01, np.inf, normal),
        "tiny": normal * 1e-39,
        "growing": np.tile(np.arange(SIZE), (ROWS, 1)),
        "falling": np.tile(np.arange(SIZE)[::-1], (ROWS, 1)),
    }[kind].astype(np.float32)


@pytest.mark.parametrize(
    "kind",
    [
        *("normal", "equal", "zero", "few values", "many equal"),
        *("mostly zero", "infinite", "tiny", "growing", "falling"),
    ],
)
def test_places_are_those_of_a_sort(kind: str) -> None:
    values = jnp.abs(rows(kind))
    expected = jnp.sort(lax.top_k(values, KEPT)[1], axis=1)
    found = jax.jit(largest_places, static_argnums=1)(values, KEPT)
    np.testing.assert_array_equal(found, expected)
