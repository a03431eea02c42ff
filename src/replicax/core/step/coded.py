"""A reduction that sends the gradient in fewer bits, and the rest of it in later steps."""

import dataclasses
from collections.abc import Iterable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from replicax.core.ground.codecs import BLOCK, Codec, CodecName, Floats, as_codec, filled
from replicax.core.ground.leaves import PyTree
from replicax.core.ground.vectors import all_reduce, as_blocks, size_in_blocks
from replicax.core.placement.mesh import Axis
from replicax.core.step.base import StepSums
from replicax.errors import ConfigError
from replicax.text.arguments import answered


@answered
@dataclasses.dataclass(frozen=True, init=False)
class Coded:
    """The sum of gradients encoded by `codec`, with error feedback. For mode `shard_map` or `pmap`.

    Each replica sums one part of the gradient, received from all, and sends the result to all:
    2 (N - 1) / N times its encoded bytes. Whatever either encoding loses, the replica that encoded
    it adds to its gradient in the next step. Loss, metrics and weights are sent in float32.

    The state is that residual, a vector in units of a mean gradient: it has the same effect in a
    step whose batch has another weight, such as a padded one. Without finite sums it is kept.

    Examples:
        >>> dp = rx.DataParallel(loss, optimizer, mode="shard_map", reduction=rx.Coded("int4"))
        >>> print(dp.reduction.name)
        int4

    Args:
        codec: `int8` or `int4`, in blocks of 64 values with a scale each; `bfloat16`; `float32`; or
            a custom codec, whose blocks divide 64 values.
    """

    codec: Codec

    def __init__(self, codec: CodecName | Codec) -> None:
        object.__setattr__(self, "codec", as_codec(codec))
        if self.codec.error >= 1:
            raise ConfigError(
                f"Coded({self.codec.name!r}); an optimizer such as Adam diverges on gradients that "
                "lack most values: use Coded('int4'); or send differences of parameters, with "
                f"rx.Rounds(every=30, send={self.codec.name!r})"
            )

    @property
    def name(self) -> str:
        """The codec's name, unless it is that of a reduction without feedback."""
        return f"coded {self.codec.name}" if isinstance(self.codec, Floats) else self.codec.name

    def init(self, params: PyTree) -> jax.Array:
        """Return a residual of 0, as long as the gradient in whole blocks."""
        return jnp.zeros(size_in_blocks(jax.tree.leaves(params)), jnp.float32)

    def __call__(self, sums: StepSums, state: jax.Array, axis: Axis) -> tuple[StepSums, jax.Array]:
        """Return the sums over all replicas, equal on each, and this replica's next residual."""
        total = StepSums(sums.gradient, all_reduce(sums.weighted, axis))
        if lax.axis_size(axis) == 1:
            return total, state
        divisor = total.divisor.astype(jnp.float32)
        own, unpack = as_blocks(lax.optimization_barrier(sums.gradient))
        sent, lost = self._sum(own + state * divisor, axis)
        counts = (total.weight != 0) & jnp.all(jnp.isfinite(sent))  # the same on all replicas
        state = jnp.where(counts, lost / divisor, state)
        gradient = unpack(lax.optimization_barrier(sent))
        return dataclasses.replace(total, gradient=gradient), state

    def _sum(self, vector: jax.Array, axis: Axis) -> tuple[jax.Array, jax.Array]:
        """Return the sum as decoded, and what this replica's encodings of it lost."""
        parts = filled(vector, lax.axis_size(axis) * BLOCK).reshape(lax.axis_size(axis), -1)
        decode = partial(self.codec.decode, size=parts.shape[1])
        payloads = jax.vmap(self.codec.encode)(parts)
        received = lax.all_to_all(payloads, axis, 0, 0)

        def add(total: jax.Array, payload: jax.Array) -> tuple[jax.Array, None]:
            return total + decode(payload), None

        # In the order of the ranks, for bits that do not depend on the program.
        own, _ = lax.scan(add, jnp.zeros_like(parts[0]), received, unroll=8)
        payload = self.codec.encode(own)
        total = jax.vmap(decode)(lax.all_gather(payload, axis))
        lost = parts - jax.vmap(decode)(payloads)
        lost = lost.at[lax.axis_index(axis)].add(own - decode(payload))
        return total.reshape(-1)[: vector.size], lost.reshape(-1)[: vector.size]

    # For `replicax verify` and `plan`.

    def error(self, roundings: int = 2) -> float:
        """Return the largest error of a total, relative to the sum of its parts' `magnitude`."""
        return (1 + self.codec.error) ** roundings - 1

    def magnitude(self, leaf: jax.Array) -> jax.Array:
        """Return the largest magnitude in the block of each value, to which errors are relative."""
        vector, unpack = as_blocks(leaf)
        largest = jnp.max(jnp.abs(vector.reshape(-1, BLOCK)), axis=1)
        found: jax.Array = unpack(jnp.repeat(largest, BLOCK))
        return found

    def unsent(self, residuals: jax.Array, gradient: PyTree) -> PyTree:
        """Return what the `residuals` of all replicas will add to mean gradients, shaped so."""
        _, unpack = as_blocks(gradient)
        return unpack(jnp.sum(residuals, axis=0))

    def payload_bytes(self, leaves: Iterable[Any], replicas: int) -> int:
        """Return the bytes of an encoded gradient of these shapes."""
        part = -(-size_in_blocks(leaves) // (replicas * BLOCK)) * BLOCK
        return replicas * self.codec.payload_bytes(part)
