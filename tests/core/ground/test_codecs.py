"""Codecs: the bytes of a payload, and errors within the bound that is declared."""

from typing import Any

import jax
import numpy as np
import pytest

from replicax.core.ground.codecs import BLOCK, CODECS, as_codec
from replicax.errors import ConfigError

SIZES = (1, 63, 64, 65, 1_000, 4_095, 4_096, 4_097, 9_000)
SMALLEST = 2.0**-127
"""Half of the smallest scale of a block."""


def sent(name: str, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the payload of some values, and the values in it."""
    codec = CODECS[name]
    payload = jax.jit(codec.encode)(values)
    assert payload.dtype == np.uint8
    back = jax.jit(codec.decode, static_argnums=1)(payload, values.size)
    assert back.dtype == np.float32
    return np.asarray(payload), np.asarray(back)


def normal(size: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=size).astype(np.float32)


def scale(values: np.ndarray) -> np.ndarray:
    """Return the largest magnitude in the block of each value."""
    blocks = np.pad(np.abs(values), (0, -values.size % BLOCK)).reshape(-1, BLOCK)
    return np.repeat(blocks.max(axis=1), BLOCK)[: values.size]


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("float32", (4, 252, 256, 260, 4_000, 16_380, 16_384, 16_388, 36_000)),
        ("bfloat16", (2, 126, 128, 130, 2_000, 8_190, 8_192, 8_194, 18_000)),
        ("int8", (66, 66, 66, 132, 1_056, 4_224, 4_224, 4_290, 9_306)),
        ("int4", (34, 34, 34, 68, 544, 2_176, 2_176, 2_210, 4_794)),
        ("sparse", (116, 116, 116, 116, 116, 116, 116, 232, 348)),
    ],
)
def test_bytes_of_a_payload(name: str, sizes: tuple[int, ...]) -> None:
    codec = CODECS[name]
    assert tuple(map(codec.payload_bytes, SIZES)) == sizes
    shapes = [
        jax.eval_shape(codec.encode, jax.ShapeDtypeStruct((size,), np.float32)) for size in SIZES
    ]
    assert tuple(shape.shape for shape in shapes) == tuple((size,) for size in sizes)


KINDS: dict[str, Any] = {
    "normal": lambda values: values,
    "of all sizes": lambda values: values * np.exp(8 * normal(values.size, 1)),
    "small": lambda values: values * np.float32(1e-36),
    "denormal": lambda values: values * np.float32(1e-40),
    "huge": lambda values: np.clip(values / 4, -1, 1) * np.finfo(np.float32).max,
    "of one block": lambda values: np.where(np.arange(values.size) < BLOCK, values, 0),
}


@pytest.mark.parametrize("size", SIZES[:5] + SIZES[-1:])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["int8", "int4"])
def test_integers_are_within_half_a_unit_of_their_block(name: str, kind: str, size: int) -> None:
    values = KINDS[kind](normal(size)).astype(np.float32)
    _, back = sent(name, values)
    most = {"int8": 127, "int4": 7}[name]
    half = 0.5 / most * (1 + 2**-7)
    assert CODECS[name].error == half
    error = np.abs(back.astype(np.float64) - values)
    assert np.all(error <= half * scale(values).astype(np.float64) * (1 + 1e-6) + SMALLEST)
    if kind == "normal" and size == SIZES[-1]:
        assert np.max(error / scale(values)) > 0.95 * half


@pytest.mark.parametrize("name", ["float32", "bfloat16"])
def test_floats_are_rounded_to_nearest(name: str) -> None:
    values = KINDS["of all sizes"](normal(9_000)).astype(np.float32)
    _, back = sent(name, values)
    relative = np.max(np.abs(back - values) / np.abs(values))
    assert {"float32": 0.0, "bfloat16": 2**-8}[name] == CODECS[name].error >= relative
    assert relative >= 0.95 * CODECS[name].error


@pytest.mark.parametrize("name", CODECS)
def test_zeros_are_zeros(name: str) -> None:
    _, back = sent(name, np.zeros(9_000, np.float32))
    assert not back.any()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("size", [64, 9_000])  # XLA:CPU's maximum of many values passes over NaNs
@pytest.mark.parametrize("name", CODECS)
def test_what_is_not_finite_stays_so_in_its_block(name: str, size: int, bad: float) -> None:
    values = normal(size)
    values[5] = bad
    _, back = sent(name, values)
    assert not np.isfinite(back[5])
    block = {"float32": 1, "bfloat16": 1, "sparse": 4_096}.get(name, BLOCK)
    clean = np.arange(size) // block != 5 // block
    assert np.all(np.isfinite(back[clean]))


def test_sparse_sends_the_64_largest_of_4096() -> None:
    values = normal(8_192)
    _, back = sent("sparse", values)
    for found, there in zip(back.reshape(2, -1), values.reshape(2, -1), strict=True):
        places = np.flatnonzero(found)
        assert set(places) == set(np.argsort(-np.abs(there))[:64])
        assert np.all(np.sign(found[places]) == np.sign(there[places]))
        assert len(np.unique(np.abs(found[places]))) == 2


def test_a_codec_by_name_or_of_ones_own() -> None:
    assert as_codec("int4") is as_codec(CODECS["int4"]) is CODECS["int4"]
    with pytest.raises(ConfigError, match="int8, int4, sparse"):
        as_codec("int2")


@pytest.mark.parametrize("scale_of_all", [1e-45, 1e-39, 1e-30, 1e30, 3e38])
@pytest.mark.parametrize("name", CODECS)
def test_tiny_and_huge_values_stay_finite(name: str, scale_of_all: float) -> None:
    values = (scale_of_all * np.random.default_rng(0).uniform(-1, 1, 100)).astype(np.float32)
    _, back = sent(name, values)
    assert np.all(np.isfinite(back))
    # XLA flushes denormals to zero.
    most = np.abs(values).max()
    assert np.all(np.abs(back - values) <= CODECS[name].error * most * (1 + 1e-6) + 1.2e-38)
