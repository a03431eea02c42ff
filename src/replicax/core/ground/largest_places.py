"""The places of the largest values of each row, as `lax.top_k` finds them, but faster.

A value among the `kept` largest lies in one of the `kept` groups with the largest maxima, so only
these groups are searched. The smallest value to keep is found bit by bit, as counting is fast on
any device; sorting is not. Of equal values the first are kept.
"""

import jax
import jax.numpy as jnp
from jax import lax

_GROUP = 8
"""Values of a group. A row is searched twice: its maxima, and the values of `kept` groups."""
_WORD = 32


def largest_places(values: jax.Array, kept: int) -> jax.Array:
    """Return the places, in order, of the `kept` largest values of each row, int32 `[rows, kept]`.

    Values are float32 `[rows, n]`, at least 0 and no NaN; `n` is divided by 256.
    """
    bits = lax.bitcast_convert_type(values, jnp.int32)  # in the order of the values
    groups = bits.reshape(bits.shape[0], -1, _GROUP)
    chosen = _first_largest(jnp.max(groups, axis=2), kept)
    found = jnp.take_along_axis(groups, chosen[:, :, None], axis=1)
    inner = _first_largest(found.reshape(-1, kept * _GROUP), kept)
    return jnp.take_along_axis(chosen, inner // _GROUP, axis=1) * _GROUP + inner % _GROUP


def _first_largest(bits: jax.Array, kept: int) -> jax.Array:
    """Return the places, in order, of the `kept` largest of each row; of equal ones the first."""
    least = _kth_largest(bits, kept)[:, None]
    above, equal = _words(bits > least), _words(bits == least)
    missing = kept - jnp.sum(_ones(above), axis=1, keepdims=True)
    first = jnp.clip(missing - _before(_ones(equal)), 0, _ones(equal))
    upto = jnp.uint32(1) << _place_of_one(equal, first).astype(jnp.uint32)
    chosen = above | jnp.where(first == _ones(equal), equal, equal & (upto - 1))
    return _places_of_ones(chosen, kept)


def _kth_largest(bits: jax.Array, rank: int) -> jax.Array:
    """Return the largest integer that at least `rank` values of each row are not below."""

    def with_bit(turn: jax.Array, least: jax.Array) -> jax.Array:
        higher = least | jnp.int32(1) << (30 - turn)
        count = jnp.sum(bits >= higher[:, None], axis=1, dtype=jnp.int32)
        return jnp.where(count >= rank, higher, least)

    found: jax.Array = lax.fori_loop(0, 31, with_bit, jnp.zeros(bits.shape[0], jnp.int32))
    return found


def _places_of_ones(words: jax.Array, count: int) -> jax.Array:
    """Return the places of the `count` ones of each row of words."""
    before = _before(_ones(words))
    upto, rank = before + _ones(words), jnp.arange(count, dtype=jnp.int32)
    number = jnp.sum(upto[:, None, :] <= rank[None, :, None], axis=2, dtype=jnp.int32)
    word, base = (jnp.take_along_axis(of, number, axis=1) for of in (words, before))
    return _WORD * number + _place_of_one(word, rank - base)


def _place_of_one(word: jax.Array, rank: jax.Array) -> jax.Array:
    """Return the place of a one in each word, given how many are below it."""
    place = jnp.zeros_like(rank)
    for half in (16, 8, 4, 2, 1):
        low = word & jnp.uint32((1 << half) - 1)
        above = rank >= _ones(low)
        rank = jnp.where(above, rank - _ones(low), rank)
        word = jnp.where(above, word >> half, low)
        place += jnp.where(above, half, 0)
    return place


def _words(chosen: jax.Array) -> jax.Array:
    """Return booleans `[rows, n]` as words of 32 bits."""
    bits = chosen.reshape(chosen.shape[0], -1, _WORD).astype(jnp.uint32)
    return jnp.sum(bits << jnp.arange(_WORD, dtype=jnp.uint32), axis=2, dtype=jnp.uint32)


def _ones(words: jax.Array) -> jax.Array:
    return lax.population_count(words).astype(jnp.int32)


def _before(counts: jax.Array) -> jax.Array:
    """Return the sum of the counts before each one of a row."""
    return jnp.cumsum(counts, axis=1) - counts
