"""Messages and arrays on a connection between islands.

A message is its length, the length with all bits flipped, and the CRC-32 of what follows, of 4
bytes each, then JSON. The header of a frame is a message too; the bytes of its arrays follow, with
a CRC-32 in the header. So a bit that was flipped on the way ends the connection, and counts for
nothing. Nothing received is executed, and every length is checked before memory is allocated.
"""

import contextlib
import json
import math
import socket
import struct
import time
import zlib
from collections.abc import Sequence

import ml_dtypes
import msgspec
import numpy as np

from replicax.cluster.message import Typed
from replicax.errors import ClusterError, ConfigError
from replicax.islands.messages import DATA, Data

LONGEST_MESSAGE_BYTES = 1 << 22
"""The limit for a control message, and for the header of a frame."""
_PREFIX = struct.Struct(">III")
_ALL_BITS = 0xFFFFFFFF
_CHUNK_BYTES = 1 << 20
"""Received at once; the checksum then finds these bytes in the processor's cache."""
_MOST_BUFFERS = 512
"""Buffers sent at once; Linux allows 1,024."""
_MOST_DIMENSIONS = 32
_MOST_ELEMENTS = 1 << 48
"""The limit for the product of the dimensions other than 0, as NumPy has one for empty arrays."""


def _dtypes() -> dict[str, np.dtype]:
    names = ["bool", "float16", "float32", "float64"]
    names += [f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)]
    kinds = [getattr(ml_dtypes, name) for name in ml_dtypes.__all__]
    found = [np.dtype(name) for name in names]
    found += [np.dtype(k) for k in kinds if isinstance(k, type) and issubclass(k, np.generic)]
    return {dtype.name: dtype for dtype in found}


EXCHANGED_DTYPES = _dtypes()
"""The dtypes that islands exchange, by name."""


class Channel:
    """One end of a connection. One thread at a time may send, and one may receive.

    Methods raise `OSError` if the connection has ended, and `ValueError` if the other end does not
    follow this protocol.
    """

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket.settimeout(None)
        self._deadline: float | None = None
        self.sent_bytes = self.received_bytes = 0

    def limit(self, seconds: float | None) -> None:
        """Let all that follows take at most `seconds`; None: any time."""
        self._deadline = None if seconds is None else time.monotonic() + seconds
        self._socket.settimeout(None)

    def send(self, message: Typed) -> None:
        """Send `message`."""
        self.send_bytes([message_bytes(message)])

    def receive(self, most_bytes: int = LONGEST_MESSAGE_BYTES) -> bytes:
        """Return the JSON of the next message, which has at most `most_bytes`."""
        prefix = bytearray(_PREFIX.size)
        self._fill(memoryview(prefix))
        length, flipped, crc = _PREFIX.unpack(prefix)
        if length ^ flipped != _ALL_BITS:
            raise ValueError(f"the length {length}, but flipped {flipped}")
        if length > most_bytes:
            raise ValueError(f"a message of {length} bytes; at most {most_bytes} are allowed")
        text = bytearray(length)
        self._fill(memoryview(text))
        if zlib.crc32(text) != crc:
            raise ValueError(f"a message with the checksum {zlib.crc32(text)} instead of {crc}")
        return bytes(text)

    def send_frame(self, header: Data, arrays: Sequence[memoryview]) -> None:
        """Send `header` and the bytes of its arrays."""
        self.send_bytes([message_bytes(header), *arrays])

    def receive_frame(self, most_bytes: int) -> tuple[Data, list[np.ndarray]]:
        """Return the next frame, whose arrays have at most `most_bytes`."""
        text = self.receive()
        try:
            header = DATA.decode(text)
        except RecursionError:
            raise ValueError("a header is not nested deeply") from None
        arrays = allocate(header.arrays, most_bytes)
        crc = 0
        for array in arrays:
            view = _bytes(array)
            for start in range(0, len(view), _CHUNK_BYTES):
                chunk = view[start : start + _CHUNK_BYTES]
                self._fill(chunk)
                crc = zlib.crc32(chunk, crc)
        if crc != header.crc:
            raise ValueError(f"arrays with the checksum {crc}; their header has {header.crc}")
        return header, arrays

    def skip(self, count: int) -> None:
        """Receive `count` bytes, and forget them."""
        chunk = memoryview(bytearray(min(count, _CHUNK_BYTES)))
        while count:
            self._fill(chunk[: min(count, len(chunk))])
            count -= min(count, len(chunk))

    def send_bytes(self, buffers: Sequence[bytes | memoryview]) -> None:
        """Send all bytes of `buffers`, without copying them together."""
        waiting = [memoryview(buffer) for buffer in buffers if len(buffer)]
        first = 0
        while first < len(waiting):
            self._set_timeout()
            sent = self._socket.sendmsg(waiting[first : first + _MOST_BUFFERS])
            self.sent_bytes += sent
            while first < len(waiting) and sent >= len(waiting[first]):
                sent -= len(waiting[first])
                first += 1
            if sent:
                waiting[first] = waiting[first][sent:]

    def has_ended(self) -> bool:
        """Whether the other end has closed, or has sent something that nobody waits for."""
        try:
            self._socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            pass
        return True

    def end(self) -> None:
        """End the connection; any thread may, and those that use it get an error."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Free the socket, once no other thread uses it."""
        self.end()
        self._socket.close()

    def _fill(self, view: memoryview) -> None:
        filled = 0
        while filled < len(view):
            self._set_timeout()
            count = self._socket.recv_into(view[filled:])
            if not count:
                raise ConnectionResetError("closed by the other end")
            filled += count
            self.received_bytes += count

    def _set_timeout(self) -> None:
        if self._deadline is not None:
            left = self._deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError("too slow")
            self._socket.settimeout(left)


def message_bytes(message: Typed) -> bytes:
    """Return `message` with its prefix; `ClusterError` if it is too long."""
    try:
        text = msgspec.json.encode(message)
    except UnicodeEncodeError:  # such as the name of a file that is not UTF-8
        plain = json.dumps(msgspec.to_builtins(message), ensure_ascii=False)
        text = plain.encode(errors="replace")
    if len(text) > LONGEST_MESSAGE_BYTES:
        raise ClusterError(
            f"a {type(message).__name__} of {len(text)} bytes for another island; at most "
            f"{LONGEST_MESSAGE_BYTES} are allowed: exchange less at once"
        )
    return prefixed(text)


def prefixed(text: bytes) -> bytes:
    """Return `text` after what `Channel.receive` expects before it."""
    return _PREFIX.pack(len(text), len(text) ^ _ALL_BITS, zlib.crc32(text)) + text


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
