"""Bytes of sums and on the wire, against sums by hand."""

import jax
import jax.numpy as jnp
import pytest

from replicax.analysis.collectives import sums_bytes, wire_bytes
from replicax.analysis.compiled import Collectives


@pytest.mark.parametrize(
    ("kind", "size", "sent"),
    [
        ("all-reduce", 400, 600),
        ("all-gather", 400, 300),
        ("reduce-scatter", 100, 300),
        ("all-to-all", 400, 300),
        ("collective-permute", 400, 400),
    ],
)
def test_bytes_on_the_wire(kind: str, size: int, sent: float) -> None:
    assert wire_bytes(Collectives(kind, 1, size), 4) == sent


def test_sums_are_float32_at_least() -> None:
    leaves = [jax.ShapeDtypeStruct((3, 5), dtype) for dtype in (jnp.bfloat16, jnp.float32)]
    assert sums_bytes(leaves, 2) == 4 * 15 + 4 * 15 + 8 * 2 + 4
    with jax.enable_x64(True):
        assert sums_bytes([jax.ShapeDtypeStruct((3,), jnp.float64)], 0) == 24


def test_a_gradient_is_counted_in_the_dtype_it_is_sent_in() -> None:
    dtypes = jnp.bfloat16, jnp.float32, jnp.complex64
    leaves = [jax.ShapeDtypeStruct((5,), dtype) for dtype in dtypes]
    assert sums_bytes(leaves, 2, jnp.bfloat16) == 2 * 5 + 2 * 5 + 4 * 5 + 8 * 2 + 4
