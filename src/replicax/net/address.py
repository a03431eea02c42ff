"""Addresses `host:port`; the host is a name, an IPv4 address, or an IPv6 address in brackets."""

import zlib

from replicax.errors import ConfigError

FIRST_DERIVED_PORT = 61440
"""First port derived from a job ID: above Linux's ephemeral ports (32768 to 60999)."""
DERIVED_PORTS = 4096
"""Number of ports that jobs are spread over: 61440 to 65535, as in JAX."""


def split_address(address: str, name: str = "coordinator") -> tuple[str, int]:
    """Split `node017:61452` or `[::1]:29400`, the value of `name`; the host loses its brackets."""
    host, colon, port = address.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host and "//" not in host:
        raise ConfigError(
            f"{name}={address} is an IPv6 address without brackets, so its port is ambiguous; "
            "the format is [host]:port: add the brackets"
        )
    if not colon or not host or any(c.isspace() or c in "/[]@" for c in host):
        raise ConfigError(
            f"{name}={address!r} is not host:port; give the host of process 0 and a free port, "
            "such as node017:29400"
        )
    return host, whole_port(port, name, address)


def join_address(host: str, port: int) -> str:
    """Return `host:port`, with brackets around an IPv6 host."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def whole_port(text: str, name: str, shown: str) -> int:
    """Return the port in `text`, which is part of `shown`, the value of `name`."""
    if not (text.isascii() and text.isdigit()) or not 1 <= int(text) <= 65535:
        raise ConfigError(
            f"{name}={shown} has the port {text!r}; a port is an integer from 1 to 65535: change it"
        )
    return int(text)


def derived_port(job: str) -> int:
    """Return a port that is the same in every process of a job, and rarely used by other jobs."""
    return FIRST_DERIVED_PORT + zlib.crc32(job.encode()) % DERIVED_PORTS
