"""Codecs: float32 vectors as bytes to send, of 4 bytes to 0.23 bits per value."""

import dataclasses
from typing import Literal, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from replicax.core.ground.largest_places import largest_places
from replicax.errors import choose

BLOCK = 64
"""Values that share a scale. A leaf is padded to whole blocks."""
_SMALLEST = float(np.finfo(np.float32).tiny)
"""The smallest scale: devices differ in whether they know smaller floats."""


class Codec(Protocol):
    """A pure function from a vector to bytes, and the one back.

    What is decoded is exact in float32 (a few bits times a bfloat16), so that its sums are equal
    bits in every program.
    """

    @property
    def name(self) -> str:
        """The name in `CODECS`."""

    def encode(self, vector: jax.Array) -> jax.Array:
        """Return the bytes, uint8 `[payload_bytes(n)]`, of a float32 vector `[n]`."""

    def decode(self, payload: jax.Array, size: int) -> jax.Array:
        """Return the float32 vector `[size]` of a payload. Not finite where `vector` was not."""

    def payload_bytes(self, size: int) -> int:
        """Return the bytes of a vector of `size` values."""

    @property
    def error(self) -> float:
        """The largest error of a value, relative to the largest magnitude in its block."""

    @property
    def block(self) -> int:
        """Values in a block."""


@dataclasses.dataclass(frozen=True)
class Floats:
    """Values rounded to a float dtype, to nearest."""

    name: str
    dtype: DTypeLike
    error: float
    block: int = 1

    def encode(self, vector: jax.Array) -> jax.Array:
        kind = jnp.finfo(self.dtype)  # type: ignore[no-untyped-call]
        # XLA may remove a pair of conversions, as it is free to compute more precisely.
        rounded = lax.reduce_precision(vector, kind.nexp, kind.nmant)
        return _as_bytes(rounded.astype(self.dtype))

    def decode(self, payload: jax.Array, size: int) -> jax.Array:
        return _from_bytes(payload, self.dtype).astype(jnp.float32)

    def payload_bytes(self, size: int) -> int:
        return size * int(jnp.dtype(self.dtype).itemsize)


@dataclasses.dataclass(frozen=True)
class Integers:
    """Signed integers of 8 or 4 bits, in blocks of 64 with a scale each.

    The scale is max|x| / (2^(bits-1) - 1), rounded up to bfloat16, so that no value is clipped;
    values are rounded to the nearest multiple of it. It is at least 2^-126.
    """

    name: str
    bits: int
    block: int = BLOCK

    @property
    def most(self) -> int:
        """The largest integer."""
        return (1 << self.bits - 1) - 1

    @property
    def error(self) -> float:
        # Half a unit of the scale, which is at most 2^-7 larger than the quotient.
        return 0.5 / self.most * (1 + 2**-7)

    def encode(self, vector: jax.Array) -> jax.Array:
        blocks = filled(vector, BLOCK).reshape(-1, BLOCK)
        # Times the reciprocal, as XLA divides by a constant in some programs and not in others.
        scales = jnp.max(jnp.abs(blocks), axis=1) * np.float32(1 / self.most)
        scales = jnp.maximum(scales, _SMALLEST)
        # XLA:CPU's maximum of many values passes over a NaN.
        scales = _rounded_up(jnp.where(jnp.all(jnp.isfinite(blocks), axis=1), scales, jnp.nan))
        whole = jnp.round(blocks / scales.astype(jnp.float32)[:, None]).astype(jnp.int8)
        packed = _as_bytes(whole.reshape(-1))
        if self.bits == 4:
            # Two bytes at a time, which a processor does faster than every other byte.
            pairs = _from_bytes(packed, jnp.uint16)
            packed = (pairs & 0xF | pairs >> 4 & 0xF0).astype(jnp.uint8)
        return jnp.concatenate([packed, _as_bytes(scales)])

    def decode(self, payload: jax.Array, size: int) -> jax.Array:
        count = -(-size // BLOCK)
        packed, scales = jnp.split(payload, [count * BLOCK * self.bits // 8])
        whole = lax.bitcast_convert_type(packed, jnp.int8)
        if self.bits == 4:  # the sign is that of the upper half of a byte
            whole = jnp.stack([whole << 4 >> 4, whole >> 4], axis=-1)
        units = _from_bytes(scales, jnp.bfloat16).astype(jnp.float32)
        values = whole.reshape(count, BLOCK).astype(jnp.float32) * units[:, None]
        return values.reshape(-1)[:size]

    def payload_bytes(self, size: int) -> int:
        count = -(-size // BLOCK)
        return count * BLOCK * self.bits // 8 + 2 * count


@dataclasses.dataclass(frozen=True)
class Sparse:
    """The 64 largest of each 4,096 values, with an index of 12 bits and a value of 2 bits.

    The 2 bits are the sign, and which of two magnitudes: the means, in bfloat16, of those above and
    not above the mean magnitude of the 64. After SparseLoCo, arXiv 2508.15706.
    """

    name: str = "sparse"
    error: float = 1.0
    """A value that is not sent is lost, unless it is kept for the next time."""
    block: int = 4096

    _kept = 64

    def encode(self, vector: jax.Array) -> jax.Array:
        blocks = filled(vector, self.block).reshape(-1, self.block)
        # A maximum may lose a NaN, and a sort put it anywhere: it counts as the largest.
        sizes = jnp.where(jnp.isnan(blocks), jnp.inf, jnp.abs(blocks))
        index = largest_places(sizes, self._kept)
        values = jnp.take_along_axis(blocks, index, axis=1)
        size = jnp.abs(values)
        large = size > jnp.sum(size / self._kept, axis=1, keepdims=True)
        levels = [_mean_where(size, large), _mean_where(size, ~large)]
        code = (2 * jnp.signbit(values) + large).astype(jnp.uint8).reshape(-1, 4)
        codes = code[:, 0] | code[:, 1] << 2 | code[:, 2] << 4 | code[:, 3] << 6
        first, second = index.reshape(-1, 2).astype(jnp.uint32).T
        pair = first | second << 12
        indices = jnp.stack([pair, pair >> 8, pair >> 16], axis=1).astype(jnp.uint8)
        magnitudes = jnp.stack(levels, axis=1).astype(jnp.bfloat16)
        return jnp.concatenate([indices.reshape(-1), codes, _as_bytes(magnitudes.reshape(-1))])

    def decode(self, payload: jax.Array, size: int) -> jax.Array:
        count = -(-size // self.block)
        of_indices, of_codes = self._kept * 12 // 8, self._kept * 2 // 8
        cuts = [count * of_indices, count * (of_indices + of_codes)]
        indices, codes, magnitudes = jnp.split(payload, cuts)
        low, middle, high = indices.reshape(-1, 3).astype(jnp.int32).T
        pair = low | middle << 8 | high << 16
        index = jnp.stack([pair & 0xFFF, pair >> 12], axis=1).reshape(count, self._kept)
        code = jnp.stack([codes >> shift & 3 for shift in (0, 2, 4, 6)], axis=1)
        code = code.reshape(count, self._kept)
        levels = _from_bytes(magnitudes, jnp.bfloat16).astype(jnp.float32).reshape(count, 2)
        chosen = jnp.where(code & 1, levels[:, :1], levels[:, 1:])
        values = jnp.where(code & 2, -chosen, chosen)
        rows = jnp.arange(count)[:, None]
        empty = jnp.zeros((count, self.block))
        blocks = empty.at[rows, index].set(values, unique_indices=True, indices_are_sorted=True)
        return blocks.reshape(-1)[:size]

    def payload_bytes(self, size: int) -> int:
        return -(-size // self.block) * (self._kept * 14 // 8 + 4)


ReductionName = Literal["float32", "bfloat16", "int8", "int4"]
"""The names of `REDUCTIONS`, for type checkers and editors: all codecs but one."""
CodecName = Literal[ReductionName, "sparse"]
"""The names of `CODECS`, for type checkers and editors."""
CODECS: dict[str, Codec] = {
    each.name: each
    for each in (
        Floats("float32", jnp.float32, 0.0),
        Floats("bfloat16", jnp.bfloat16, 2**-8),
        Integers("int8", 8),
        Integers("int4", 4),
        Sparse(),
    )
}
"""Codecs by name, as in `Coded("int8")` and `--send int4`."""


def as_codec(codec: str | Codec) -> Codec:
    """Return the codec of that name, or a custom one; otherwise raise `ConfigError`."""
    if not isinstance(codec, str) and hasattr(codec, "encode"):
        return codec
    return choose("send", codec, CODECS)


def filled(vector: jax.Array, multiple: int) -> jax.Array:
    """Return a vector with zeros added, to a length that is a multiple."""
    return jnp.pad(vector, (0, -vector.size % multiple))


def _rounded_up(values: jax.Array) -> jax.Array:
    """Return values that are not negative, and no NaNs, rounded to bfloat16 and up."""
    bits = lax.bitcast_convert_type(values, jnp.uint32)
    return lax.bitcast_convert_type(((bits + 0xFFFF) >> 16).astype(jnp.uint16), jnp.bfloat16)


def _mean_where(values: jax.Array, chosen: jax.Array) -> jax.Array:
    """Return the mean of the chosen values of each row; 0 if there are none."""
    count = jnp.maximum(jnp.sum(chosen, axis=1, keepdims=True), 1)
    return jnp.sum(jnp.where(chosen, values / count, 0), axis=1)  # the sum of all may overflow


def _as_bytes(array: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(array, jnp.uint8).reshape(-1)


def _from_bytes(payload: jax.Array, dtype: DTypeLike) -> jax.Array:
    size = jnp.dtype(dtype).itemsize
    return lax.bitcast_convert_type(payload.reshape(-1, size), dtype)
