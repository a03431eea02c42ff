"""Which dtype the model computes in. Parameters, optimizer and reduction stay in float32."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from replicax.errors import choose


@dataclasses.dataclass(frozen=True)
class Precision:
    """A dtype policy.

    `float32` leaves everything as the user has it. `bfloat16` hands the loss parameters and
    floating-point batch leaves in bfloat16; their gradients come back in the parameters' own dtype,
    because the cast is part of what is differentiated.
    """

    name: str

    def __post_init__(self) -> None:
        choose("precision", self.name, dict.fromkeys(("float32", "bfloat16")))

    def to_compute(self, tree: Any) -> Any:
        """`tree` with its floating-point arrays in the dtype of the computation."""
        return tree if self.name == "float32" else jax.tree.map(_to_bfloat16, tree)


def to_sum(array: jax.Array) -> jax.Array:
    """`array` in the dtype of sums: float32, or wider where it is wider."""
    return array.astype(jnp.promote_types(array.dtype, jnp.float32))


def _to_bfloat16(leaf: Any) -> Any:
    floating = jnp.issubdtype(jnp.result_type(leaf), jnp.floating)
    return jnp.asarray(leaf, jnp.bfloat16) if floating else leaf
