"""Messages of JSON over a connection."""

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

from replicax.cluster.wire import Connection, Gather, Message, decode
from replicax.net.message import PREFIX_BYTES, Received, prefixed, to_json

TEXTS = drawn(Message).map(to_json)
DEEP = [b"[" * 60_000, b'["Hello","j",1,2,"h",1,' + b'{"a":' * 9000]


@given(drawn(Message))
def test_any_message_there_and_back(message: Any) -> None:
    back = decode(to_json(message))
    assert (type(back), back) == (type(message), message)


@given(harmed(TEXTS) | st.binary(max_size=80) | st.sampled_from(DEEP))
def test_any_other_text_is_refused_or_a_message(text: bytes) -> None:
    with contextlib.suppress(ValueError):
        assert decode(to_json(decode(text))) == decode(text)


@pytest.mark.parametrize(
    "text",
    [b"[1]", b"{}", b"", b'["Gone"]', b'["Bye",1]', b'["Hello","j",true,2]', b"\xff\xfe"],
)
def test_what_is_no_message(text: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        decode(text)


@given(st.lists(st.binary(max_size=12), max_size=5), st.integers(1, 30), st.integers(0, 12))
def test_texts_come_whole_in_pieces_of_any_size_and_long_ones_do_not(
    texts: list[bytes], size: int, most: int
) -> None:
    received, found = Received(most), []
    sent = b"".join(map(prefixed, texts))
    short = next((n for n, text in enumerate(texts) if len(text) > most), len(texts))
    with contextlib.nullcontext() if short == len(texts) else pytest.raises(ValueError, match="at"):
        for start in range(0, len(sent), size):
            received.feed(sent[start : start + size])
            while (text := received.take()) is not None:
                found.append(text)
            assert len(received._unread) < PREFIX_BYTES + most
    assert found == texts[:short]


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
