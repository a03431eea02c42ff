"""Sockets that listen or connect, and who leaves a port where too many strangers wait."""

import errno
import random
import socket
from collections.abc import Collection
from typing import TypeVar

MORE_STRANGERS = 16
"""Connections that may be open before they are proven, besides one per process or island."""
AGAIN_SECONDS = 0.1
"""How long to wait if the system has no descriptor left for a connection."""
_LOOPBACK = ("localhost", "127.", "::1")
Stranger = TypeVar("Stranger")


def is_loopback(host: str) -> bool:
    """Whether only processes on the same host can reach `host`."""
    return host.startswith(_LOOPBACK)


def bind_port(
    host: str, port: int, option: int = socket.SO_REUSEADDR, *, listens: bool = False
) -> socket.socket:
    """Return a socket bound to `port`: on all interfaces, unless `host` is a loopback address."""
    bound = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, option, 1)
        bound.bind((host if is_loopback(host) else "", port))
        if listens:
            bound.listen(1024)
    except BaseException:
        bound.close()
        raise
    return bound


def connect_to(host: str, port: int, seconds: float) -> socket.socket:
    """Return a connection; `OSError` if there is none within `seconds`."""
    connected = socket.create_connection((host, port), timeout=seconds)
    try:
        # A port of the ephemeral range can be connected to itself, while nobody listens on it.
        if connected.getsockname() == connected.getpeername():
            raise ConnectionRefusedError(errno.ECONNREFUSED, "nobody listens")
    except BaseException:
        connected.close()
        raise
    return connected


def who_leaves(strangers: Collection[Stranger], most: int) -> Stranger | None:
    """Return the one of the connections not yet proven that ends for a new one, if any must.

    Not the new one, or a few slow strangers would keep everybody out; and no certain one, or a
    fast stranger would.
    """
    return random.choice(list(strangers)) if len(strangers) >= most else None
