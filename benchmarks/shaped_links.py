"""Links of islands on one host, of a limited rate: network namespaces, or a throttling relay."""

import ctypes
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, TypeVar

from relay import Relay

_NEW_NETWORK = 0x40000000
"""CLONE_NEWNET of `unshare`, which moves the calling thread alone into a new namespace."""
_SHAPER = "tbf rate {rate} burst {burst} latency 400ms"
"""A token bucket, whose queue drops what would wait longer, as the buffer of a router does."""
BURST_BYTES = 65536
_PORT = 29400
_Result = TypeVar("_Result")


class ShapedLinks(Protocol):
    """One link for each island, to all others together: so many bytes per second both ways."""

    kind: str
    """How they are shaped, for the report."""

    def addresses(self, island: int) -> str:
        """Return the addresses of all islands, as one of them reaches them."""

    def start(self, island: int, command: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
        """Start a process that has the link of an island; `options` are those of `Popen`."""

    def close(self) -> None:
        """Free everything. No process may use the links any more."""


class NoNamespacesError(Exception):
    """Network namespaces cannot be shaped here; the message says why."""


def shaped_links(
    islands: int, bytes_per_second: float, *, relay: bool = False
) -> tuple[ShapedLinks, str]:
    """Return links of namespaces if possible and wanted, else of a relay; and why of a relay."""
    why = "asked for"
    if not relay:
        try:
            return NamespaceLinks(islands, bytes_per_second), ""
        except NoNamespacesError as error:
            why = str(error)
    return RelayLinks(islands, bytes_per_second), why


class NamespaceLinks:
    """Islands in network namespaces, joined by a bridge in another; `tc` limits both directions.

    A namespace is that of a thread and of the processes it starts. The system removes it, with all
    its devices, once these have ended, however they ended: nothing has to be cleaned up.
    """

    kind = "tc tbf in network namespaces"

    def __init__(self, islands: int, bytes_per_second: float) -> None:
        self._islands = islands
        self._rooms: list[_Namespace] = []
        shaper = _SHAPER.format(rate=f"{round(8 * bytes_per_second)}bit", burst=BURST_BYTES)
        try:
            self._join(shaper.split())
        except BaseException:
            self.close()
            raise

    def _join(self, shaper: list[str]) -> None:
        if not sys.platform.startswith("linux"):
            raise NoNamespacesError(f"{sys.platform} has no network namespaces")
        bridge = self._room()
        bridge.run("ip", "link", "add", "bridge", "type", "bridge")
        bridge.run("ip", "link", "set", "bridge", "up")
        for number in range(self._islands):
            own, port = self._room(), f"port{number}"
            pair = ("type", "veth", "peer", "name", "uplink", "netns", str(own.thread_id))
            bridge.run("ip", "link", "add", port, *pair)
            bridge.run("ip", "link", "set", port, "master", "bridge", "up")
            # Each end limits what it sends: the port what the island receives.
            bridge.run("tc", "qdisc", "add", "dev", port, "root", *shaper)
            own.run("ip", "addr", "add", f"{_host(number)}/24", "dev", "uplink")
            own.run("ip", "link", "set", "uplink", "up")
            own.run("ip", "link", "set", "lo", "up")
            own.run("tc", "qdisc", "add", "dev", "uplink", "root", *shaper)

    def _room(self) -> "_Namespace":
        self._rooms.append(_Namespace())
        return self._rooms[-1]

    def addresses(self, island: int) -> str:
        return ",".join(f"{_host(number)}:{_PORT}" for number in range(self._islands))

    def start(self, island: int, command: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
        return self._rooms[1 + island].do(lambda: subprocess.Popen(command, **options))

    def close(self) -> None:
        for room in self._rooms:
            room.close()
        self._rooms.clear()


def _host(island: int) -> str:
    return f"10.77.0.{island + 1}"


class _Namespace:
    """A network namespace: that of a thread, which runs what it is given there."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "replicax-namespace")
        try:
            self.thread_id = self.do(_enter)
        except BaseException:
            self.close()
            raise

    def do(self, function: Callable[[], _Result]) -> _Result:
        """Call `function` in the namespace; a process that it starts is there, too."""
        return self._thread.submit(function).result()

    def run(self, *command: str) -> None:
        """Run a command to its end; `NoNamespacesError` if it fails."""
        if shutil.which(command[0]) is None:
            raise NoNamespacesError(f"{command[0]} is not installed")

        def call() -> subprocess.CompletedProcess[str]:
            return subprocess.run(command, capture_output=True, text=True, check=False)

        done = self.do(call)
        if done.returncode:
            lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
            raise NoNamespacesError(f"{' '.join(command[:3])}: {lines[-1]}")

    def close(self) -> None:
        self._thread.shutdown()


def _enter() -> int:
    """Move this thread into a new namespace; return its ID."""
    library = ctypes.CDLL(None, use_errno=True)
    if library.unshare(_NEW_NETWORK):
        reason = os.strerror(ctypes.get_errno())
        raise NoNamespacesError(f"a new network namespace: {reason}")
    return threading.get_native_id()


class RelayLinks:
    """Islands on the loopback interface, whose connections all go through a `Relay`."""

    kind = "a throttling relay"

    def __init__(self, islands: int, bytes_per_second: float) -> None:
        self._relay = Relay(islands, bytes_per_second, BURST_BYTES)

    def addresses(self, island: int) -> str:
        return ",".join(f"127.0.0.1:{port}" for port in self._relay.ports_of(island))

    def start(self, island: int, command: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
        return subprocess.Popen(command, **options)

    def close(self) -> None:
        self._relay.close()
