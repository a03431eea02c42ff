"""Frames: any array arrives with its bits, and nothing else is taken for one."""

import math
import tracemalloc
import zlib
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.arriving import Arriving, drawn, harmed
from support.tiers import only

from replicax.errors import ClusterError, ConfigError
from replicax.islands.frames import (
    EXCHANGED_DTYPES,
    allocate,
    checksum,
    frame_parts,
    message_bytes,
    receive_frame,
)
from replicax.islands.messages import CONTROL_DECODER, Data, Frame, Have, Out
from replicax.net.channel import LONGEST_MESSAGE_BYTES, Channel
from replicax.net.message import PREFIX_BYTES, encode, prefixed

FRAME = Frame(1, 2, [(0, 2), (5, 1)], '{"note": 1}')
MOST = 1 << 16
PIECES = st.lists(st.integers(1, 50), max_size=3)
SHAPES = st.lists(st.integers(0, 3), max_size=3)


@st.composite
def arrays(draw: st.DrawFn) -> np.ndarray:
    """Draw an array with any bits, which may lie in any order."""
    dtype = EXCHANGED_DTYPES[draw(st.sampled_from([*EXCHANGED_DTYPES]))]
    shape = draw(SHAPES)
    size = math.prod(shape) * dtype.itemsize
    bits = np.frombuffer(draw(st.binary(min_size=size, max_size=size)), np.uint8)
    array = (bits % 2 if dtype.name == "bool" else bits).view(dtype).reshape(shape)
    return array.T if draw(st.booleans()) else array[..., ::-1] if shape else array


def channel(*given_arguments: Any, **how: Any) -> Channel:
    return Channel(Arriving(*given_arguments, **how))  # type: ignore[arg-type]


def raw(header: Data, arrays: list[np.ndarray]) -> bytes:
    packed, views = frame_parts(header, arrays)
    return message_bytes(checksum(packed, views)) + b"".join(views)


FRAMES = st.tuples(drawn(Data), st.lists(arrays(), max_size=3))


@settings(max_examples=50)
@given(st.lists(FRAMES, max_size=2), PIECES)
def test_all_frames_arrive_with_their_bits_in_pieces_of_any_size(
    frames: list[tuple[Data, list[np.ndarray]]], pieces: list[int]
) -> None:
    sends = Arriving(pieces=pieces)
    there = Channel(sends)  # type: ignore[arg-type]
    for header, given_arrays in frames:
        packed, views = frame_parts(header, given_arrays)
        there.send_bytes([encode(checksum(packed, views)), *views])
    here = channel(bytes(sends.sent), pieces)
    for header, given_arrays in frames:
        back, found = receive_frame(here, MOST)
        crc = zlib.crc32(b"".join(each.tobytes() for each in given_arrays))
        kinds = [(each.dtype.name, [*each.shape]) for each in given_arrays]
        assert back == msgspec.structs.replace(header, arrays=kinds, crc=crc)
        for array, copy in zip(given_arrays, found, strict=True):
            assert (copy.dtype, copy.shape) == (array.dtype, array.shape)
            assert copy.tobytes() == array.tobytes()
            assert copy.flags.writeable
    assert here.received_bytes == there.sent_bytes == len(sends.sent)
    with pytest.raises(ConnectionResetError):
        receive_frame(here, MOST)


def receive(sent: bytes, most: int = MOST, **how: Any) -> tuple[Data, list[np.ndarray]]:
    """Receive a frame, and assert that no more memory is allocated than is allowed."""
    tracemalloc.start()
    try:
        return receive_frame(channel(sent, **how), most)
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < LONGEST_MESSAGE_BYTES + most + 400_000


@pytest.mark.promise("islands.strangers")
@pytest.mark.parametrize("examples", only([200], [200, 10_000], sampled=[]))
def test_whatever_happens_to_a_frame_it_is_refused_or_as_it_was_meant(examples: int) -> None:
    encoded = FRAMES.map(lambda frame: raw(*frame))
    # Its sender may also mean so what is wrong with the header.
    meant = harmed(drawn(Data).map(msgspec.json.encode)).map(prefixed)

    @settings(max_examples=examples, suppress_health_check=[*HealthCheck])
    @given(harmed(encoded) | meant, PIECES, st.booleans())
    def check(sent: bytes, pieces: list[int], stays: bool) -> None:
        try:
            header, found = receive(sent, pieces=pieces, stays=stays)
        except (OSError, ValueError):
            return
        assert zlib.crc32(b"".join(each.tobytes() for each in found)) == header.crc
        assert sum(each.nbytes for each in found) <= MOST

    check()


@pytest.mark.promise("islands.strangers")
def test_any_flipped_bit_and_any_cut_is_noticed() -> None:
    sent = raw(FRAME, [np.arange(3, dtype=np.float32)])
    for bit in range(8 * len(sent)):
        flipped = bytearray(sent)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises(ValueError, match=r"\d"):  # and the connection stays open meanwhile
            receive_frame(channel(bytes(flipped), stays=True), MOST)
    for kept in range(len(sent)):
        with pytest.raises(ConnectionError):
            receive_frame(channel(sent[:kept]), MOST)


ODD_DTYPES = ("object", "O", "U9", "complex64", "float32\x00", "finfo", "__version__", "i4,(9,9)f8")
SIZES = st.integers(0, 9) | st.sampled_from([-1, MOST, 1 << 31, 1 << 48, 1 << 63, 1 << 200])


@given(
    st.lists(
        st.tuples(
            st.sampled_from([*EXCHANGED_DTYPES] * 2 + [*ODD_DTYPES]),
            st.lists(SIZES, max_size=3) | st.just([1] * 33),
        ),
        max_size=3,
    )
)
def test_arrays_are_refused_before_memory_is_allocated(kinds: list[tuple[str, list[int]]]) -> None:
    fine = all(
        name in EXCHANGED_DTYPES
        and len(shape) <= 32
        and min(shape, default=0) >= 0
        and math.prod(size or 1 for size in shape) <= 1 << 48
        for name, shape in kinds
    )
    if fine:
        total = sum(math.prod(shape) * EXCHANGED_DTYPES[name].itemsize for name, shape in kinds)
        fine = total <= MOST
    tracemalloc.start()
    try:
        found = allocate(kinds, MOST)
    except ValueError:
        assert not fine
    else:
        assert fine
        assert [(each.dtype.name, [*each.shape]) for each in found] == kinds
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < MOST + 100_000


def told(length: int) -> bytes:
    """Return what comes before a message of this length, with a checksum of 0."""
    return length.to_bytes(8) + (length ^ ((1 << 64) - 1)).to_bytes(8) + bytes(4)


@pytest.mark.parametrize(
    ("sent", "named"),
    [
        (
            told(LONGEST_MESSAGE_BYTES + 1),
            f"{LONGEST_MESSAGE_BYTES + 1} .* {LONGEST_MESSAGE_BYTES}",
        ),
        (told((1 << 64) - 1) + b"x" * 100, str((1 << 64) - 1)),
        (b"GET / HTTP/1.1\r\nHost: a\r\n\r\n", "flipped"),
        (told(0), "truncated"),
        (message_bytes(Have(1, 2)), "Have"),
        (prefixed(b"[" * 100_000), "nested"),
        (prefixed(b'["Frame",1,2,"",[' + b"[" * 100_000), "int|array|nested"),
        (message_bytes(msgspec.structs.replace(FRAME, arrays=[("int8", [1.5])])), "int"),
        (message_bytes(msgspec.structs.replace(FRAME, arrays=[("int8", [True])])), "int"),
        (message_bytes(msgspec.structs.replace(FRAME, arrays=[("int8", None)])), "array"),
        (raw(FRAME, [np.zeros(MOST + 1, bool)]), f"{MOST + 1} .* {MOST}"),
    ],
)
def test_what_is_no_frame_is_named(sent: bytes, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        receive(sent, stays=True)


def test_many_arrays_a_large_one_and_one_of_another_byte_order() -> None:
    many = [np.full(n % 5, n, np.int16) for n in range(3000)]
    large = np.random.default_rng(0).random(1_000_000)
    swapped = np.arange(5, dtype=">i4")
    given_arrays = [*many, large, swapped]
    sends = Arriving()
    packed, views = frame_parts(FRAME, given_arrays)
    Channel(sends).send_bytes([encode(checksum(packed, views)), *views])  # type: ignore[arg-type]
    found = receive_frame(channel(bytes(sends.sent)), large.nbytes * 2)[1]
    assert [each.tolist() for each in found] == [each.tolist() for each in given_arrays]


def test_arrays_are_not_copied_to_be_sent() -> None:
    array = np.zeros((100, 3), np.float32)
    (view,) = frame_parts(FRAME, [array])[1]
    array[:] = 1
    assert bytes(view) == array.tobytes()


@pytest.mark.parametrize("dtype", ["complex64", "datetime64[s]", "S3", "O", "i4,i4", "longdouble"])
def test_other_dtypes_are_not_sent(dtype: str) -> None:
    with pytest.raises(ConfigError, match=np.dtype(dtype).name[:8]):
        frame_parts(FRAME, [np.zeros(2, dtype)])


def test_what_is_too_long_is_not_sent() -> None:
    with pytest.raises(ClusterError, match=f"Out .* {LONGEST_MESSAGE_BYTES} "):
        message_bytes(Out("x" * LONGEST_MESSAGE_BYTES))
    with pytest.raises(ClusterError, match=f"Frame .* {LONGEST_MESSAGE_BYTES} "):
        frame_parts(msgspec.structs.replace(FRAME, note="x" * LONGEST_MESSAGE_BYTES), [])


def test_text_that_is_no_utf_8_is_sent() -> None:
    assert CONTROL_DECODER.decode(message_bytes(Out("\udcff!"))[PREFIX_BYTES:]) == Out("?!")
