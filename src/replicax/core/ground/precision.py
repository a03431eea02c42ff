"""The dtype the model computes in. Parameters, optimizer and reduction stay in float32."""

import dataclasses
from functools import partial
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp

from replicax.errors import choose

PrecisionName = Literal["float32", "bfloat16", "float16"]
"""The names of precisions, for type checkers and editors."""
_DTYPES = {"bfloat16": jnp.bfloat16, "float16": jnp.float16}


@dataclasses.dataclass(frozen=True)
class Precision:
    """A dtype policy.

    `float32` leaves all dtypes unchanged. `bfloat16` passes parameters and floating-point batch
    leaves to the loss in bfloat16; gradients have the parameters' dtype, because the cast is
    differentiated too. `float16` does the same in float16, for GPUs without bfloat16, with dynamic
    loss scaling.
    """

    name: str

    def __post_init__(self) -> None:
        choose("precision", self.name, dict.fromkeys(get_args(PrecisionName)))

    @property
    def scales(self) -> bool:
        """Whether the loss is scaled so that gradients do not underflow."""
        return self.name == "float16"

    @property
    def eps(self) -> float:
        """Return the machine epsilon of the computation."""
        return float(jnp.finfo(_DTYPES.get(self.name, jnp.float32)).eps)  # type: ignore[no-untyped-call]

    def to_compute(self, tree: Any) -> Any:
        """Cast the floating-point arrays of `tree` to the dtype of the computation."""
        if self.name == "float32":
            return tree
        return jax.tree.map(partial(_cast, dtype=_DTYPES[self.name]), tree)


def as_precision(precision: str | Precision) -> Precision:
    """Return the policy of that name, or raise `ConfigError`."""
    return precision if isinstance(precision, Precision) else Precision(precision)


def to_sum(array: jax.Array) -> jax.Array:
    """Cast `array` to the dtype of sums: float32, or its own dtype if wider."""
    narrow = is_narrow_float(array.dtype)
    return array.astype(jnp.float32 if narrow else jnp.promote_types(array.dtype, jnp.float32))


def is_narrow_float(dtype: Any) -> bool:
    """Whether it is a floating-point dtype of at most 8 bits, which JAX promotes to no other."""
    return bool(jnp.issubdtype(dtype, jnp.floating)) and dtype.itemsize == 1


def _cast(leaf: Any, dtype: Any) -> Any:
    floating = jnp.issubdtype(jnp.result_type(leaf), jnp.floating)
    return jnp.asarray(leaf, dtype) if floating else leaf
