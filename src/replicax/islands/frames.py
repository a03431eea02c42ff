"""Arrays on a connection between islands.

The header of a frame is a message; the bytes of its arrays follow, with a CRC-32 in the header.
Every length is checked before memory is allocated.
"""

import math
import zlib
from collections.abc import Sequence

import ml_dtypes
import msgspec
import numpy as np

from replicax.errors import ClusterError, ConfigError
from replicax.islands.messages import DATA, Data
from replicax.net.channel import CHUNK_BYTES, LONGEST_MESSAGE_BYTES, Channel
from replicax.net.message import Typed, prefixed, read_message, to_json

_MOST_DIMENSIONS = 32
_MOST_ELEMENTS = 1 << 48
"""The limit for the product of the dimensions other than 0, as NumPy has one for empty arrays."""


def _dtypes() -> dict[str, np.dtype]:
    names = ["bool", "float16", "float32", "float64"]
    names += [f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)]
    kinds = [getattr(ml_dtypes, name) for name in ml_dtypes.__all__]
    dtypes = [np.dtype(name) for name in names]
    dtypes += [np.dtype(k) for k in kinds if isinstance(k, type) and issubclass(k, np.generic)]
    return {dtype.name: dtype for dtype in dtypes}


EXCHANGED_DTYPES = _dtypes()
"""The dtypes that islands exchange, by name."""


def receive_frame(channel: Channel, most_bytes: int) -> tuple[Data, list[np.ndarray]]:
    """Return the next frame, whose arrays have at most `most_bytes`; raises as `Channel`."""
    header = read_message(channel.receive(), DATA)
    arrays = allocate(header.arrays, most_bytes)
    crc = 0
    for array in arrays:
        view = _bytes(array)
        for start in range(0, len(view), CHUNK_BYTES):
            chunk = view[start : start + CHUNK_BYTES]
            channel.fill(chunk)
            crc = zlib.crc32(chunk, crc)
    if crc != header.crc:
        raise ValueError(f"arrays with the checksum {crc}; their header has {header.crc}")
    return header, arrays


def message_bytes(message: Typed) -> bytes:
    """Return `message` as it travels; `ClusterError` if it is too long."""
    text = to_json(message)
    if len(text) > LONGEST_MESSAGE_BYTES:
        raise ClusterError(
            f"a {type(message).__name__} of {len(text)} bytes for another island; at most "
            f"{LONGEST_MESSAGE_BYTES} are allowed: exchange less at once"
        )
    return prefixed(text)


def frame_parts(header: Data, arrays: Sequence[np.ndarray]) -> tuple[Data, list[memoryview]]:
    """Return `header` with the dtypes and shapes of `arrays`, and their bytes in row-major order.

    Nothing is copied unless an array is not contiguous. `checksum` fills in the rest.
    `ConfigError` if islands do not exchange a dtype.
    """
    kinds = [(array.dtype.name, array.shape) for array in arrays]
    for name, _ in kinds:
        if name not in EXCHANGED_DTYPES:
            raise ConfigError(
                f"an array of dtype {name}; islands exchange booleans, integers and real numbers "
                f"such as {', '.join(list(EXCHANGED_DTYPES)[:5])}: convert it"
            )
    views = [
        _bytes(np.ascontiguousarray(a, EXCHANGED_DTYPES[n]))
        for a, (n, _) in zip(arrays, kinds, strict=True)
    ]
    packed = msgspec.structs.replace(header, arrays=kinds, crc=0xFFFFFFFF)
    message_bytes(packed)  # is it too long? The caller learns it, and not the thread that sends it
    return packed, views


def checksum(header: Data, views: Sequence[memoryview]) -> Data:
    """Return `header` with the checksum of its arrays."""
    crc = 0
    for view in views:
        crc = zlib.crc32(view, crc)
    return msgspec.structs.replace(header, crc=crc)


def allocate(kinds: Sequence[tuple[str, Sequence[int]]], most_bytes: int) -> list[np.ndarray]:
    """Return arrays of these dtypes and shapes; `ValueError` if they exceed `most_bytes`."""
    total = 0
    for name, shape in kinds:
        if name not in EXCHANGED_DTYPES:
            raise ValueError(f"an array of dtype {name[:40]!r}; islands do not exchange it")
        if len(shape) > _MOST_DIMENSIONS or any(size < 0 for size in shape):
            raise ValueError(f"an array of shape {str(list(shape))[:200]}")
        if math.prod(size or 1 for size in shape) > _MOST_ELEMENTS:
            raise ValueError(f"an array of shape {str(list(shape))[:200]}")
        total += math.prod(shape) * EXCHANGED_DTYPES[name].itemsize
        if total > most_bytes:
            raise ValueError(f"arrays of {total} bytes; at most {most_bytes} are allowed")
    return [np.empty(shape, EXCHANGED_DTYPES[name]) for name, shape in kinds]


def _bytes(array: np.ndarray) -> memoryview:
    """Return the bytes of a contiguous array, not copied."""
    return array.reshape(-1).view(np.uint8).data
