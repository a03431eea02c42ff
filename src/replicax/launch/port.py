"""A free port on this host."""

import contextlib
import random
import socket
from pathlib import Path

EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")
LOWEST = 20000
TRIES = 50


def free_port() -> int:
    """A port that nothing listens on.

    Below the range that outgoing connections take theirs from, where that is known: from there, one
    could take the port before process 0 listens on it, or even come to meet itself.
    """
    for _ in range(TRIES):
        with contextlib.suppress(OSError, ValueError):
            start = int(EPHEMERAL.read_text(encoding="ascii").split()[0])
            return _bound(random.randrange(LOWEST, start))
    return _bound(0)


def _bound(port: int) -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", port))
        bound: int = listener.getsockname()[1]
        return bound
