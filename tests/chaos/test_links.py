"""Wires between two islands that stall, end, and change what they carry."""

import socket
from collections.abc import Iterator

import pytest
from chaos.islands.links import Links, Wire
from support.waiting import HANG_SECONDS

from replicax.launch.process import free_port

Ends = tuple[Wire, socket.socket, socket.socket]


@pytest.fixture
def ends() -> Iterator[Ends]:
    """The wire of islands 1 and 0, and both ends of a connection that island 1 has dialled."""
    links = Links([free_port(), free_port()])
    with socket.create_server(("127.0.0.1", links.ports[0])) as listening:
        dialled = socket.create_connection(("127.0.0.1", links.ports_of(1)[0]))
        reached, _ = listening.accept()
    with dialled, reached:
        for end in (dialled, reached):
            end.settimeout(HANG_SECONDS)
        dialled.sendall(b"!")
        assert reached.recv(1) == b"!"
        yield links.wires[1, 0], dialled, reached
    links.close()


def test_what_a_stalled_wire_holds_comes_once_it_is_healed(ends: Ends) -> None:
    wire, dialled, reached = ends
    wire.stall()
    dialled.sendall(b"late")
    reached.settimeout(0.1)
    with pytest.raises(TimeoutError):
        reached.recv(1)
    wire.heal()
    reached.settimeout(HANG_SECONDS)
    assert reached.recv(4) == b"late"


def test_a_trap_changes_what_one_of_them_sends_and_only_once(ends: Ends) -> None:
    wire, dialled, reached = ends
    wire.trap(1, 3, lambda rest: rest.upper())
    reached.sendall(b"answer")
    assert dialled.recv(6) == b"answer"
    for sent, came in ((b"ab", b"ab"), (b"cde", b"cDE"), (b"fgh", b"fgh")):
        dialled.sendall(sent)
        assert reached.recv(len(sent)) == came


def test_a_trap_can_end_the_connection_between_two_bytes(ends: Ends) -> None:
    wire, dialled, reached = ends
    wire.trap(1, 2, lambda rest: None)
    dialled.sendall(b"abcd")
    assert reached.recv(4) == b"ab"
    assert dialled.recv(1) == b""
