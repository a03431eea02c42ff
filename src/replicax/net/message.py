"""Typed messages between processes and between islands, and how they travel on a connection.

A message is its length and the length with all bits flipped, of 8 bytes each, the CRC-32 of what
follows, then JSON. So a bit that was flipped on the way ends the connection, and counts for
nothing. Nothing received is executed: types are checked, and each length before memory is
allocated.
"""

import json
import struct
import zlib
from typing import TypeVar

import msgspec

_PREFIX = struct.Struct(">QQI")
PREFIX_BYTES = _PREFIX.size
_ALL_BITS = (1 << 64) - 1
Parsed = TypeVar("Parsed")


class Typed(msgspec.Struct, array_like=True, tag=True, forbid_unknown_fields=True):
    """A message: a JSON array of its class's name and its fields."""


def to_json(value: object) -> bytes:
    """Return `value` in JSON: what its receiver would write, too."""
    try:
        return msgspec.json.encode(value)
    except UnicodeEncodeError:  # such as the name of a file that is not UTF-8
        plain = json.dumps(msgspec.to_builtins(value), ensure_ascii=False)
        return msgspec.json.encode(msgspec.json.decode(plain.encode(errors="replace")))


def read_message(text: bytes, decoder: msgspec.json.Decoder[Parsed]) -> Parsed:
    """Return the message in `text`; `ValueError` if there is none."""
    try:
        return decoder.decode(text)
    except RecursionError:
        raise ValueError("a message is not nested deeply") from None


def encode(message: Typed) -> bytes:
    """Return `message` as it travels."""
    return prefixed(to_json(message))


def prefixed(text: bytes) -> bytes:
    """Return `text` after what is expected before it."""
    return _PREFIX.pack(len(text), len(text) ^ _ALL_BITS, zlib.crc32(text)) + text


class Received:
    """Splits received bytes into the texts of messages, each of at most `most_bytes`."""

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        self.missing_bytes = PREFIX_BYTES
        """Bytes that must come before `take` can return more."""
        self._unread = bytearray()

    def feed(self, arrived: bytes | bytearray) -> None:
        """Add received bytes."""
        self._unread += arrived

    def take(self) -> bytes | None:
        """Return the next text; None if it is not whole yet, `ValueError` if it is none."""
        end = PREFIX_BYTES
        if len(self._unread) >= end:
            length, flipped, crc = _PREFIX.unpack_from(self._unread)
            if length ^ flipped != _ALL_BITS:
                raise ValueError(f"the length {length}, but flipped {flipped}")
            if length > self.most_bytes:
                raise ValueError(f"a message of {length} bytes; at most {self.most_bytes} allowed")
            end += length
        self.missing_bytes = end - len(self._unread)
        if self.missing_bytes > 0:
            return None
        text = bytes(self._unread[PREFIX_BYTES:end])
        del self._unread[:end]
        if zlib.crc32(text) != crc:
            raise ValueError(f"a message with the checksum {zlib.crc32(text)} instead of {crc}")
        return text
