"""Arrays in a few characters, to compare them across processes and runs."""

import hashlib
import zlib
from typing import Any

import jax
import numpy as np

from replicax.core.random_keys import numbers


def describe_leaves(data: Any) -> dict[str, str]:
    """Path -> dtype, shape and checksum of each array in `data`."""
    described = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(data):
        array = _on_host(leaf)
        name = jax.tree_util.keystr(path) or "data"
        checksum = f"{zlib.crc32(array.tobytes()):08x}"
        described[name] = f"{array.dtype}{list(array.shape)} {checksum}"
    return described


def sha256(data: Any) -> str:
    """SHA-256, in hex, of the path, dtype, shape and bits of each array in `data`."""
    digest = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_leaves_with_path(data):
        array = _on_host(leaf)
        digest.update(f"{jax.tree_util.keystr(path)} {array.dtype}{array.shape}".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()


def _on_host(leaf: Any) -> np.ndarray:
    """`leaf` as a contiguous host array; of random keys, their numbers."""
    return np.ascontiguousarray(numbers(leaf) if isinstance(leaf, jax.Array) else leaf)
