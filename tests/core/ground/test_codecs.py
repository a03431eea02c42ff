"""Codecs: the bytes of a payload, what comes back, and how far off it may be."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from replicax.core.ground.codecs import (
    BLOCK,
    CODECS,
    Codec,
    Integers,
    as_codec,
    as_vector,
    from_vector,
    vector_size,
)
from replicax.errors import ConfigError

RNG = np.random.default_rng(0)
SIZES = (1, 63, 64, 65, 4095, 4096, 4097, 9000)
ALL = list(CODECS.values())


def there_and_back(codec: Codec, vector: np.ndarray) -> np.ndarray:
    payload = jax.jit(codec.encode)(jnp.asarray(vector, jnp.float32))
    assert payload.dtype == jnp.uint8
    assert payload.shape == (codec.payload_bytes(vector.size),)
    return np.asarray(jax.jit(codec.decode, static_argnums=1)(payload, vector.size))


def blocks(vector: np.ndarray, size: int = BLOCK) -> np.ndarray:
    return np.pad(vector, (0, -vector.size % size)).reshape(-1, size)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("codec", ALL, ids=str)
def test_what_comes_back_is_within_the_error(codec: Codec, size: int) -> None:
    vector = (RNG.normal(size=size) * 10.0 ** RNG.integers(-3, 3, size)).astype(np.float32)
    found = there_and_back(codec, vector)
    largest = np.abs(blocks(vector)).max(1, keepdims=True)
    if codec.name == "sparse":
        largest = np.full_like(largest, np.abs(vector).max())
    assert np.all(np.abs(blocks(found - vector)) <= codec.error * largest)


@pytest.mark.parametrize(
    ("name", "of_9000"),
    [
        ("float32", 36_000),
        ("bfloat16", 18_000),
        ("int8", 141 * 66),
        ("int4", 141 * 34),
        ("sparse", 3 * 116),
    ],
)
def test_the_bytes_of_a_payload(name: str, of_9000: int) -> None:
    assert CODECS[name].payload_bytes(9000) == of_9000


@pytest.mark.parametrize("codec", ALL, ids=str)
def test_a_block_of_zeros_comes_back_as_zeros(codec: Codec) -> None:
    vector = np.zeros(9000, np.float32)
    vector[200] = 1.0
    found = there_and_back(codec, vector)
    assert found[200] == pytest.approx(1.0, abs=0.0 if codec.error == 1 else codec.error)
    assert np.all(np.delete(found, 200) == 0)


@pytest.mark.parametrize("codec", ALL, ids=str)
@pytest.mark.parametrize("scale", [1e-45, 1e-39, 1e-30, 1e30, 3e38])
def test_tiny_and_huge_values_stay_finite(codec: Codec, scale: float) -> None:
    vector = np.float32(scale) * RNG.uniform(-1, 1, size=100).astype(np.float32)
    found = there_and_back(codec, vector)
    assert np.all(np.isfinite(found))
    bound = codec.error if codec.name != "sparse" else 1.0
    # XLA flushes denormals to zero.
    assert np.all(np.abs(found - vector) <= bound * np.abs(vector).max() + 1.2e-38)


@pytest.mark.parametrize("codec", ALL, ids=str)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_comes_back_as_not_finite(codec: Codec, bad: float) -> None:
    vector = RNG.normal(size=9000).astype(np.float32)
    vector[70] = bad
    found = there_and_back(codec, vector)
    assert not np.all(np.isfinite(found))
    size = 4096 if codec.name == "sparse" else BLOCK
    assert np.all(np.isfinite(np.delete(blocks(found, size), 70 // size, axis=0)))


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_integers_are_multiples_of_half_rounded_scales(name: str) -> None:
    codec = CODECS[name]
    assert isinstance(codec, Integers)
    vector = RNG.normal(size=640).astype(np.float32)
    found = blocks(there_and_back(codec, vector))
    scale = np.abs(blocks(vector)).max(1) / codec.most
    unit = np.asarray(jnp.asarray(scale).astype(jnp.bfloat16).astype(jnp.float32))
    unit = np.where(unit < scale, np.nextafter(unit, np.inf), unit)
    upper = unit * (1 + 2**-7)
    assert np.all(np.abs(found - blocks(vector)) <= 0.5 * upper[:, None])
    assert np.abs(found).max() <= codec.most * upper.max()


def test_sparse_keeps_the_largest_of_each_block() -> None:
    vector = RNG.permutation(np.arange(1, 4097)).astype(np.float32)
    vector *= RNG.choice([-1, 1], 4096)
    found = there_and_back(CODECS["sparse"], vector)
    kept = np.flatnonzero(found)
    assert sorted(kept) == sorted(np.argsort(-np.abs(vector))[:64])
    assert np.all(np.sign(found[kept]) == np.sign(vector[kept]))
    largest = np.abs(vector[kept])
    high = largest > largest.mean()
    levels = {
        float(jnp.bfloat16(largest[high].mean())),
        float(jnp.bfloat16(largest[~high].mean())),
    }
    assert set(np.abs(found[kept]).tolist()) == levels


def test_a_tree_as_a_vector_and_back() -> None:
    tree = {
        "a": jnp.asarray(RNG.normal(size=(3, 5)), jnp.float32),
        "b": jnp.asarray(RNG.normal(size=()), jnp.bfloat16),
        "c": jnp.zeros((0, 2)),
        "d": jnp.asarray(RNG.normal(size=(130,)), jnp.float32),
    }
    vector = as_vector(tree)
    assert vector.shape == (vector_size(tree),) == (64 + 64 + 192,)
    back = from_vector(vector, tree)
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), back) == jax.tree.map(
        lambda leaf: (leaf.shape, leaf.dtype), tree
    )
    jax.tree.map(np.testing.assert_array_equal, back, tree)
    assert as_vector({}).shape == (vector_size({}),) == (0,)


def test_an_unknown_name_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="int4"):
        as_codec("int5")
    assert as_codec(CODECS["int4"]) is CODECS["int4"]
