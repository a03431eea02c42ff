"""Messages that hypothesis draws, harm to their bytes, and the socket on which bytes arrive."""

import itertools
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from hypothesis import strategies as st

from replicax.net.message import Typed

_PLAIN: dict[Any, st.SearchStrategy[Any]] = {
    bool: st.booleans(),
    int: st.integers(-(2**63), 2**64 - 1) | st.integers(-1, 5),
    float: st.floats(allow_nan=False, allow_infinity=False),
    str: st.text(max_size=8),
    type(None): st.none(),
}


def drawn(kind: Any) -> st.SearchStrategy[Any]:
    """Draw values of a type of messages, or of their fields."""
    inner = typing.get_args(kind)
    match typing.get_origin(kind):
        case None if isinstance(kind, type) and issubclass(kind, Typed):
            hints = typing.get_type_hints(kind)
            fields = [drawn(hints[each.name]) for each in msgspec.structs.fields(kind)]
            return st.builds(kind, *fields)
        case None:
            return _PLAIN[kind]
        case types.UnionType:
            return st.one_of(*map(drawn, inner))
        case origin if issubclass(origin, tuple):
            return st.tuples(*map(drawn, inner))
        case origin if issubclass(origin, Mapping):
            return st.dictionaries(*map(drawn, inner), max_size=3)
        case origin:
            assert issubclass(origin, Sequence)
            return st.lists(drawn(inner[0]), max_size=3)


@st.composite
def harmed(draw: st.DrawFn, whole: st.SearchStrategy[bytes]) -> bytes:
    """Draw bytes that are cut, flipped, changed, missing, twice, or of something else."""
    data = draw(whole)
    for _ in range(draw(st.integers(1, 3))):
        start = draw(st.integers(0, len(data)))
        before, piece, after = data[:start], data[start : start + 30], data[start + 30 :]
        match draw(st.sampled_from(["flip", "cut", "missing", "twice", "JSON", "noise"])):
            case "flip":
                bit = 1 << draw(st.integers(0, 7))
                data = before + bytes(byte ^ bit for byte in piece[:1]) + piece[1:] + after
            case "cut":
                data = before
            case "missing":
                data = before + after
            case "twice":
                data = before + piece + piece + after
            case "JSON":
                other = draw(st.sampled_from([*b'[]{}",-0123456789ex \\\xff\x00']))
                data = before + bytes([other]) + piece[1:] + after
            case _:
                data = before + draw(st.binary(max_size=60)) + after
    return data


class Arriving:
    """A socket on which these bytes come, in pieces, and then an end or nothing more."""

    def __init__(self, data: bytes = b"", pieces: Sequence[int] = (), *, stays: bool = False):
        self._left, self._stays = memoryview(data), stays
        self._pieces = itertools.cycle(pieces or [1 << 20])
        self.sent = bytearray()
        self.most_bytes = 0
        """The most for which memory was there at once."""

    def more(self, data: bytes) -> None:
        self._left = memoryview(bytes(self._left) + data)

    def recv_into(self, view: memoryview) -> int:
        self.most_bytes = max(self.most_bytes, len(view))
        if not self._left and self._stays:
            raise TimeoutError("nothing comes")
        count = min(len(view), len(self._left), next(self._pieces))
        view[:count] = self._left[:count]
        self._left = self._left[count:]
        return count

    def sendmsg(self, buffers: Sequence[memoryview]) -> int:
        given = b"".join(buffers)[: next(self._pieces)]
        self.sent += given
        return len(given)

    def recv(self, *_: Any) -> bytes:
        return b""

    def setsockopt(self, *_: Any) -> None:
        pass

    settimeout = shutdown = setsockopt

    def close(self) -> None:
        pass
