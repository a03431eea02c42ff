"""Which dtype the model computes in. Parameters, optimizer and reduction stay in float32."""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from replicax.errors import choose

_DTYPES = {"bfloat16": jnp.bfloat16, "float16": jnp.float16}


@dataclasses.dataclass(frozen=True)
class Precision:
    """A dtype policy.

    `float32` leaves everything as the user has it. `bfloat16` hands the loss parameters and
    floating-point batch leaves in bfloat16; their gradients come back in the parameters' own dtype,
    because the cast is part of what is differentiated. `float16` does so in float16, for GPUs that
    have no bfloat16, with dynamic loss scaling; see `replicax.core.scaling`.
    """

    name: str

    def __post_init__(self) -> None:
        choose("precision", self.name, dict.fromkeys(("float32", *_DTYPES)))

    @property
    def scales(self) -> bool:
        """Whether the loss is scaled, lest its gradient be too small for the dtype."""
        return self.name == "float16"

    @property
    def eps(self) -> float:
        """Unit of rounding of the computation."""
        return float(jnp.finfo(_DTYPES.get(self.name, jnp.float32)).eps)  # type: ignore[no-untyped-call]

    def to_compute(self, tree: Any) -> Any:
        """`tree` with its floating-point arrays in the dtype of the computation."""
        if self.name == "float32":
            return tree
        return jax.tree.map(partial(_cast, dtype=_DTYPES[self.name]), tree)


def as_precision(precision: str | Precision) -> Precision:
    """Return the policy of that name, or raise `ConfigError`."""
    return precision if isinstance(precision, Precision) else Precision(precision)


def to_sum(array: jax.Array) -> jax.Array:
    """`array` in the dtype of sums: float32, or wider where it is wider."""
    return array.astype(jnp.promote_types(array.dtype, jnp.float32))


def _cast(leaf: Any, dtype: Any) -> Any:
    floating = jnp.issubdtype(jnp.result_type(leaf), jnp.floating)
    return jnp.asarray(leaf, dtype) if floating else leaf
