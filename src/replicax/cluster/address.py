"""`host:port`, where the host may be a name, IPv4 or IPv6 in brackets."""

import zlib

from replicax.errors import ConfigError

FIRST_DERIVED_PORT = 61440
"""Ports derived from a job's id start here: above Linux's ephemeral ports (32768 to 60999)."""
DERIVED_PORTS = 4096
"""How many ports jobs are spread over: 61440 to 65535, as in JAX."""


def split_address(address: str, name: str = "coordinator") -> tuple[str, int]:
    """Split `node017:61452` or `[::1]:29400` of the variable `name`; the host has no brackets."""
    host, colon, port = address.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host and "//" not in host:
        raise ConfigError(
            f"{name}={address} is IPv6 without brackets, so its port cannot be told; "
            "an address is [host]:port: add the brackets"
        )
    if not colon or not host or any(c.isspace() or c in "/[]@" for c in host):
        raise ConfigError(
            f"{name}={address!r} is not host:port; give the host of process 0 and a free port, "
            "as in node017:29400"
        )
    return host, whole_port(port, name, address)


def join_address(host: str, port: int) -> str:
    """`host:port`, with the brackets that IPv6 needs."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def whole_port(text: str, name: str, shown: str) -> int:
    """The port in `text`, which is a part of what `name` holds, `shown`."""
    if not (text.isascii() and text.isdigit()) or not 1 <= int(text) <= 65535:
        raise ConfigError(
            f"{name}={shown} has the port {text!r}; "
            "a port is a whole number from 1 to 65535: change it"
        )
    return int(text)


def derived_port(job: str) -> int:
    """A port that every process of a job agrees on, and that other jobs rarely share."""
    return FIRST_DERIVED_PORT + zlib.crc32(job.encode()) % DERIVED_PORTS
