"""Arrays that the first process of an island gives the others."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from replicax.islands import shared_parts

_NAN = np.array([0x7FC00001, 0xFF800001], np.uint32).view(np.float32)


@pytest.mark.parametrize(
    "array",
    [
        np.array([-0.0, 0.0, *_NAN, 1e-45], np.float32),
        np.array([[-0.0, 1.5], [2.0, -3.0]], ml_dtypes.bfloat16).T,
        np.array([True, False, True]),
        np.array(-7, np.int8),
        np.zeros((0, 3), np.float64),
    ],
    ids=lambda array: f"{array.dtype}{list(array.shape)}",
)
def test_arrays_keep_their_bits_in_pieces_of_any_size(
    array: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broadcast(words: np.ndarray) -> np.ndarray:
        """Add those of two processes, as JAX does: all but the first give zeros."""
        of_each = jnp.stack([words, jnp.zeros_like(words)])
        return np.asarray(jnp.sum(of_each, axis=0, dtype=words.dtype))

    monkeypatch.setattr(shared_parts.multihost_utils, "broadcast_one_to_all", broadcast)
    monkeypatch.setattr(shared_parts, "_PIECE_BYTES", 3)
    same = shared_parts._same_in_all(array)
    assert (same.dtype, same.shape, same.tobytes()) == (array.dtype, array.shape, array.tobytes())


def test_a_follower_makes_arrays_of_the_same_kinds() -> None:
    arrays = [np.ones((2, 3), ml_dtypes.float8_e4m3fn), np.array(1, np.int64)]
    made = shared_parts._empty(shared_parts._kinds(arrays))
    assert made is not None
    assert [(m.dtype, m.shape) for m in made] == [(a.dtype, a.shape) for a in arrays]
