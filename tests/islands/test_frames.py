"""Frames: any array arrives with its bits, and nothing else is taken for one."""

import random
import socket
import struct
import threading
import tracemalloc
import zlib
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest

from replicax.errors import ClusterError, ConfigError
from replicax.islands.frames import (
    EXCHANGED_DTYPES,
    LONGEST_MESSAGE_BYTES,
    Channel,
    allocate,
    checksum,
    frame_parts,
    message_bytes,
    prefixed,
)
from replicax.islands.messages import CONTROL_DECODER, Frame, Have, Out, State, View

FRAME = Frame(1, 2, "a topic", [(0, 2), (5, 1)], '{"note": 1}')
STATE = State(View(3, [(0, "a"), (1, "b")], [0], 7, [[0], []]), 7, "0" * 64)
MOST = 1 << 20


@pytest.fixture
def pair() -> Iterator[tuple[Channel, Channel]]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        there = socket.create_connection(server.getsockname())
        here, _ = server.accept()
    ends = Channel(here), Channel(there)
    for end in ends:
        end.limit(60.0)  # a test of broken code ends
    yield ends
    for end in ends:
        end.close()


def send(there: Channel, header: Frame | State, arrays: list[np.ndarray]) -> None:
    packed, views = frame_parts(header, arrays)
    there.send_frame(checksum(packed, views), views)


def raw(header: Frame | State, arrays: list[np.ndarray]) -> bytes:
    packed, views = frame_parts(header, arrays)
    return message_bytes(checksum(packed, views)) + b"".join(views)


def refuse(sent: bytes, pair: tuple[Channel, Channel], named: str) -> None:
    """Send these bytes and close; assert that they are refused."""
    here, there = pair
    sending = threading.Thread(target=there.send_bytes, args=([sent],))
    sending.start()
    with pytest.raises(ValueError, match=named):
        here.receive_frame(MOST)
    here.close()
    sending.join()


def told(length: int) -> bytes:
    """Return what comes before a message of this length, with a checksum of 0."""
    return struct.pack(">III", length, length ^ 0xFFFFFFFF, 0)


def kinds(name: str, chance: random.Random) -> list[np.ndarray]:
    dtype = EXCHANGED_DTYPES[name]
    count = 24 * dtype.itemsize
    bits = np.frombuffer(chance.randbytes(count), np.uint8)
    if name == "bool":
        bits = bits % 2
    some = bits.view(dtype)
    return [some, some.reshape(2, 3, 4), some[:1].reshape(()), some[:0].reshape(0, 7), some[::-2]]


@pytest.mark.parametrize("name", EXCHANGED_DTYPES)
def test_arrays_of_each_dtype_there_and_back(name: str, pair: tuple[Channel, Channel]) -> None:
    here, there = pair
    arrays = kinds(name, random.Random(name))
    send(there, FRAME, arrays)
    header, found = here.receive_frame(MOST)
    assert isinstance(header, Frame)
    assert (header.topic, header.note) == (FRAME.topic, FRAME.note)
    assert [tuple(block) for block in header.blocks] == FRAME.blocks
    for array, back in zip(arrays, found, strict=True):
        assert (back.dtype, back.shape) == (array.dtype, array.shape)
        assert back.tobytes() == array.tobytes()
        assert back.flags.writeable
    assert here.received_bytes == there.sent_bytes == len(raw(FRAME, arrays))


def test_a_state_many_arrays_and_none(pair: tuple[Channel, Channel]) -> None:
    here, there = pair
    arrays = [np.full(n % 5, n, np.int16) for n in range(3000)]
    send(there, STATE, arrays)
    send(there, FRAME, [])
    header, found = here.receive_frame(MOST)
    assert isinstance(header, State)
    assert (header.view.kept, header.exchange) == ([[0], []], 7)
    assert [each.tolist() for each in found] == [each.tolist() for each in arrays]
    assert here.receive_frame(0)[1] == []


def test_a_large_array_and_one_of_another_byte_order(pair: tuple[Channel, Channel]) -> None:
    here, there = pair
    large = np.random.default_rng(0).random(1_000_000)
    swapped = np.arange(5, dtype=">i4")
    sending = threading.Thread(target=send, args=(there, FRAME, [large, swapped]))
    sending.start()
    found = here.receive_frame(large.nbytes + 20)[1]
    sending.join()
    assert np.array_equal(found[0], large)
    assert found[1].tolist() == [0, 1, 2, 3, 4]


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
    assert CONTROL_DECODER.decode(message_bytes(Out("\udcff!"))[12:]) == Out("?!")


@pytest.mark.parametrize("place", [-1, -9, 100])
def test_a_flipped_bit_is_noticed(place: int, pair: tuple[Channel, Channel]) -> None:
    sent = bytearray(raw(FRAME, [np.arange(100)]))
    sent[len(sent) - 800 + place if place > 0 else place] ^= 4
    refuse(bytes(sent), pair, "checksum")


@pytest.mark.parametrize("kept", [0, 1, 3, 4, 20, -1])
def test_an_end_in_the_middle(kept: int, pair: tuple[Channel, Channel]) -> None:
    here, there = pair
    there.send_bytes([raw(FRAME, [np.arange(100)])[:kept]])
    there.close()
    with pytest.raises(ConnectionError):
        here.receive_frame(MOST)


ENORMOUS = 1 << 40


@pytest.mark.parametrize(
    ("arrays", "named"),
    [
        ([("float32", [ENORMOUS])], str(4 * ENORMOUS)),
        ([("float32", [MOST // 4]), ("bool", [1])], f"{MOST + 1} .* {MOST}"),
        ([("float64", [2**31, 2**31, 2**31])], "shape"),
        ([("int8", [0, 2**63])], "shape"),
        ([("int8", [0, 2**200])], "shape|integer"),
        ([("int8", [-1])], "-1"),
        ([("int8", [-1, -1])], "-1"),
        ([("int8", [1] * 33)], "shape"),
        ([("int8", [1.5])], "int"),
        ([("int8", [True])], "int"),
        ([("int8", None)], "array"),
        ([("object", [1])], "object"),
        ([("O", [1])], "'O'"),
        ([("U9", [1])], "U9"),
        ([("complex64", [1])], "complex64"),
        ([("float32\x00", [1])], "float32"),
        ([("finfo", [1])], "finfo"),
        ([("__version__", [1])], "__version__"),
        ([("i4,(9999,9999)f8", [1])], "i4"),
    ],
)
def test_headers_are_refused_before_memory_is_allocated(
    arrays: list[Any], named: str, pair: tuple[Channel, Channel]
) -> None:
    sent = message_bytes(msgspec.structs.replace(FRAME, arrays=arrays))
    tracemalloc.start()
    try:
        refuse(sent, pair, named)
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "sent",
    [
        told(LONGEST_MESSAGE_BYTES + 1),
        told(0xFFFFFFFF) + b"x" * 100,
        b"GET / HTTP/1.1\r\n\r\n",
        told(0),
        prefixed(b""),
        struct.pack(">I", 2) * 3 + b"{}",
        message_bytes(Have(1, 2)),
        prefixed(b"[" * 100_000),
        prefixed(b"\xff\xfe\x00\x01"),
    ],
)
def test_what_is_no_header(sent: bytes, pair: tuple[Channel, Channel]) -> None:
    refuse(sent, pair, ".")


def test_the_limit_holds_for_all_arrays_together() -> None:
    assert [a.shape for a in allocate([("int8", [3]), ("int16", [2])], 7)] == [(3,), (2,)]
    with pytest.raises(ValueError, match=r"7 .* 6"):
        allocate([("int8", [3]), ("int16", [2])], 6)


def malformed(chance: random.Random) -> bytes:
    """Return a frame with something wrong."""
    dtypes = chance.sample(list(EXCHANGED_DTYPES), 3)
    arrays = [array for name in dtypes for array in kinds(name, chance)]
    sent = bytearray(raw(chance.choice([FRAME, STATE]), arrays))
    header = 12 + int.from_bytes(sent[:4], "big")
    match chance.randrange(5):
        case 0:  # flipped bits
            for _ in range(chance.randrange(1, 9)):
                sent[chance.randrange(len(sent))] ^= 1 << chance.randrange(8)
        case 1:  # bytes of the header, which its sender means so
            for _ in range(chance.randrange(1, 4)):
                sent[chance.randrange(12, header)] = chance.choice(
                    b'[]{}",-0123456789ex \\\xff\x00'
                )
            sent[:header] = prefixed(bytes(sent[12:header]))
        case 2:  # a piece missing, or twice
            start, count = chance.randrange(len(sent)), chance.randrange(1, 40)
            sent[start : start + chance.choice([0, count])] = sent[start : start + count] * (
                chance.randrange(2)
            )
        case 3:  # noise
            sent = bytearray(chance.randbytes(chance.randrange(300)))
        case _:  # noise in a message
            noise = chance.randbytes(chance.randrange(300))
            sent = bytearray(chance.choice([prefixed(noise), told(7) + noise, told(1 << 30)]))
    return bytes(sent)


def fuzz(count: int, seed: int) -> None:
    chance = random.Random(seed)
    refused = 0
    for _ in range(count):
        here, there = map(Channel, socket_pair())
        there.send_bytes([malformed(chance)])
        there.close()
        try:
            header, arrays = here.receive_frame(MOST)
        except (OSError, ValueError):
            refused += 1
        else:  # it happens: nothing changed, or a letter of the topic
            crc = 0
            for array in arrays:
                crc = zlib.crc32(array.tobytes(), crc)
            assert crc == header.crc
            assert sum(array.nbytes for array in arrays) <= MOST
        here.close()
    assert refused > 0.8 * count


def socket_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        there = socket.create_connection(server.getsockname())
        return server.accept()[0], there


def test_any_flipped_bit_is_noticed() -> None:
    sent = raw(FRAME, [np.arange(3, dtype=np.float32)])
    for bit in range(8 * len(sent)):
        here, there = map(Channel, socket_pair())
        there.send_bytes(
            [sent[: bit // 8] + bytes([sent[bit // 8] ^ 1 << bit % 8]) + sent[bit // 8 + 1 :]]
        )
        with pytest.raises(ValueError, match=r"\d"):  # and the connection stays open meanwhile
            here.receive_frame(MOST)
        here.close()
        there.close()


def test_malformed_frames_are_refused() -> None:
    fuzz(2_000, seed=0)


@pytest.mark.exhaustive
def test_many_malformed_frames_are_refused() -> None:
    fuzz(10_000, seed=1)
