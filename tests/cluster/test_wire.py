"""Lines of JSON over a connection."""

import socket
import threading
import time
from collections.abc import Iterator

import pytest
from support.waiting import HANG_SECONDS

from replicax.cluster.watchdog import Heartbeat, StuckVerdict
from replicax.cluster.wire import Connection, Failed, Gather, Hello, Message, Tick, decode, encode


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


@pytest.mark.parametrize(
    "message",
    [
        Gather("a topic", '{"text": "zwölf\\nlines", "numbers": [1, 2.5, null]}'),
        Hello("ours", 0, 2, environment={"jax": "0.10"}, gpus=["GPU-1"]),
        Heartbeat(),  # allowed any time
        StuckVerdict("late", [1], stacks=True, code=75),
    ],
    ids=lambda message: type(message).__name__,
)
def test_there_and_back(message: Message) -> None:
    assert encode(message).count(b"\n") == 1
    back = decode(encode(message))
    assert (type(back), back) == (type(message), message)


@pytest.mark.parametrize(
    "line",
    [
        *(b"[1]\n", b"3\n", b"[]\n", b"{}\n", b'["Gone"]\n', b'[["Bye"]]\n', b'["Bye",1]\n'),
        *(b"GET / HTTP/1.1\n", b"\xff\xfe\n", b"\n"),
    ],
)
def test_what_is_no_message(line: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        decode(line)


def test_messages_keep_their_order_and_their_bounds(pair: tuple[Connection, Connection]) -> None:
    here, there = pair
    sent = [Gather(str(n), "x" * (n * 7919)) for n in range(40)]

    def send() -> None:
        for message in sent:
            there.send(message)

    sending = threading.Thread(target=send)
    sending.start()
    assert receive_all(here, len(sent)) == sent
    sending.join()


def test_threads_do_not_mix_their_messages(pair: tuple[Connection, Connection]) -> None:
    here, there = pair
    texts = [letter * 100_000 for letter in "abcd"]

    def send(text: str) -> None:
        for _ in range(5):
            there.send(Gather("t", text))

    threads = [threading.Thread(target=send, args=(text,)) for text in texts]
    for thread in threads:
        thread.start()
    found = receive_all(here, 20)
    for thread in threads:
        thread.join()
    assert sorted(each.value for each in found if isinstance(each, Gather)) == sorted(texts * 5)


def test_who_stops_reading_finds_the_rest_later(pair: tuple[Connection, Connection]) -> None:
    here, there = pair
    there._socket.sendall(encode(Tick([1])) + encode(Tick([2])) + b'["Tick",')
    assert next(here.receive(HANG_SECONDS)) == Tick([1])
    assert list(here.receive(HANG_SECONDS)) == [Tick([2])]
    there._socket.sendall(b"[3]]\n")
    assert list(here.receive(HANG_SECONDS)) == [Tick([3])]


def test_nothing_comes_in_time(pair: tuple[Connection, Connection]) -> None:
    started = time.monotonic()
    assert list(pair[0].receive(0.05)) == []
    assert 0.04 < time.monotonic() - started < 2.0


def test_the_other_end_closes(pair: tuple[Connection, Connection]) -> None:
    here, there = pair
    last = Failed("the last word", False)
    there.send(last)
    there.close()
    assert list(here.receive(HANG_SECONDS)) == [last]
    with pytest.raises(ConnectionError):
        list(here.receive(HANG_SECONDS))


def test_a_message_without_an_end(pair: tuple[Connection, Connection]) -> None:
    here, there = pair
    here._received.most = 1000
    there._socket.sendall(b"x" * 5000)
    with pytest.raises(ValueError, match=r"1000"):
        receive_all(here, 1)


def test_a_reader_that_takes_nothing(
    pair: tuple[Connection, Connection], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, there = pair
    there._socket.settimeout(0.1)
    with pytest.raises(TimeoutError):
        there.send(Gather("t", "x" * 50_000_000))


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
