"""Links of a limited rate between two programs, with bytes that are really sent."""

import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest
from shaped_links import NamespaceLinks, NoNamespacesError, RelayLinks, ShapedLinks

RATE = 4e6
"""Bytes per second."""
SENT_BYTES = 4_000_000
_RECEIVES = """
import socket, sys, time
host, port = sys.argv[1].rsplit(":", 1)
with socket.create_server((host, int(port))) as listening:
    print("ready", flush=True)
    came, received = listening.accept()[0], 0
    while received < 100_000:  # the burst, and the start of the connection
        received += len(came.recv(1 << 16))
    first, began = received, time.monotonic()
    while data := came.recv(1 << 16):
        received += len(data)
print((received - first) / (time.monotonic() - began))
"""
_SENDS = """
import socket, sys
host, port = sys.argv[1].rsplit(":", 1)
with socket.create_connection((host, int(port))) as there:
    there.sendall(bytes(int(sys.argv[2])))
"""


def measured_rate(links: ShapedLinks, sender: int, receiver: int) -> float:
    """Return the bytes per second at which one island receives from another."""
    own = links.addresses(receiver).split(",")[receiver]
    of_other = links.addresses(sender).split(",")[receiver]
    options = {"stdout": subprocess.PIPE}
    receives = links.start(receiver, [sys.executable, "-c", _RECEIVES, own], **options)
    assert receives.stdout.readline() == b"ready\n"
    arguments = [of_other, str(SENT_BYTES)]
    links.start(sender, [sys.executable, "-c", _SENDS, *arguments]).wait()
    told, _ = receives.communicate(timeout=60)
    return float(told)


@pytest.fixture
def relay() -> Iterator[RelayLinks]:
    links = RelayLinks(3, RATE)
    yield links
    links.close()


@pytest.fixture
def namespaces() -> Iterator[NamespaceLinks]:
    try:
        links = NamespaceLinks(3, RATE)
    except NoNamespacesError as error:
        pytest.skip(f"network namespaces cannot be shaped here: {error}")
    yield links
    links.close()


def test_a_relay_has_its_rate(relay: RelayLinks) -> None:
    assert measured_rate(relay, 0, 1) == pytest.approx(RATE, rel=0.1)


def test_connections_share_the_uplink_of_a_relay(relay: RelayLinks) -> None:
    found: list[float] = []

    def measure(receiver: int) -> None:
        found.append(measured_rate(relay, 0, receiver))

    threads = [threading.Thread(target=measure, args=(receiver,)) for receiver in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert min(found) == pytest.approx(RATE / 2, rel=0.15)


def test_namespaces_have_their_rate(namespaces: NamespaceLinks) -> None:
    # The headers of Ethernet, IP and TCP are 4.4% of a full packet.
    assert measured_rate(namespaces, 2, 0) == pytest.approx(RATE, rel=0.1)


def test_namespaces_leave_nothing_behind(namespaces: NamespaceLinks) -> None:
    namespaces.close()
    devices = subprocess.run(["ip", "link"], capture_output=True, text=True, check=True).stdout
    assert "uplink" not in devices
    assert "port0" not in devices
