"""Lines of JSON over a connection."""

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.arriving import drawn, harmed
from support.waiting import HANG_SECONDS

from replicax.cluster.wire import Connection, Gather, Message, Received, decode, encode

LINES = drawn(Message).map(encode)
DEEP = [b"[" * 60_000 + b"\n", b'["Hello","j",1,2,"h",1,' + b'{"a":' * 9000 + b"\n"]


@given(drawn(Message))
def test_any_message_there_and_back_in_one_line(message: Any) -> None:
    line = encode(message)
    assert (line.count(b"\n"), line[-1:]) == (1, b"\n")
    back = decode(line)
    assert (type(back), back) == (type(message), message)


@given(harmed(LINES) | st.binary(max_size=80) | st.sampled_from(DEEP))
def test_any_other_line_is_refused_or_a_message(line: bytes) -> None:
    with contextlib.suppress(ValueError):
        assert decode(encode(decode(line))) == decode(line)


@pytest.mark.parametrize(
    "line",
    [b"[1]", b"{}", b"", b'["Gone"]', b'["Bye",1]', b'["Hello","j",true,2]', b"\xff\xfe"],
)
def test_what_is_no_message(line: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        decode(line + b"\n")


@given(st.lists(st.binary(max_size=12), max_size=12), st.integers(0, 30))
def test_lines_come_whole_however_they_were_sent_and_long_ones_do_not(
    pieces: list[bytes], most: int
) -> None:
    received, found = Received(most), []
    *whole, rest = b"".join(pieces).split(b"\n")
    short = next((n for n, line in enumerate(whole) if len(line) > most), len(whole))
    try:
        for piece in pieces:
            received.feed(piece)
            while (line := received.take()) is not None:
                found.append(line)
            assert len(received._unread) <= most
    except ValueError:
        short_ones = whole[:short]
        assert max(map(len, [*whole[short:], rest])) > most
    else:
        short_ones = whole
    assert found == short_ones


@pytest.fixture
def pair() -> Iterator[tuple[Connection, Connection]]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        there = socket.create_connection(server.getsockname())
        here, _ = server.accept()
    ends = Connection(here), Connection(there)
    yield ends
    for end in ends:
        end.close()


def receive_all(wire: Connection, count: int) -> list[Message]:
    found: list[Message] = []
    while len(found) < count:
        found += wire.receive(timeout_seconds=HANG_SECONDS)
    return found


def test_messages_keep_their_order_and_threads_do_not_mix_theirs(
    pair: tuple[Connection, Connection],
) -> None:
    here, there = pair
    sent = [[Gather(letter, letter * n * 9973) for n in range(8)] for letter in "abcd"]
    threads = [threading.Thread(target=lambda m=m: [*map(there.send, m)]) for m in sent]
    for thread in threads:
        thread.start()
    found = receive_all(here, 32)
    for thread in threads:
        thread.join()
    assert [[m for m in found if m.topic == letter] for letter in "abcd"] == sent  # type: ignore[union-attr]


def test_closing_ends_a_receive_in_another_thread(pair: tuple[Connection, Connection]) -> None:
    here, _ = pair
    ended = threading.Event()

    def receive() -> None:
        with pytest.raises((OSError, ValueError)):
            receive_all(here, 1)
        ended.set()

    thread = threading.Thread(target=receive)
    thread.start()
    time.sleep(0.05)
    here.close()
    assert ended.wait(HANG_SECONDS)
    thread.join()
