"""`host:port`, where the host may be a name, IPv4 or IPv6 in brackets."""

from replicax.errors import ConfigError

FIRST_DERIVED_PORT = 61440
"""Ports derived from a job's id start here: above Linux's ephemeral ports (32768 to 60999)."""
DERIVED_PORTS = 4096
"""How many ports jobs are spread over: 61440 to 65535, as in JAX."""


def split_address(address: str, name: str = "coordinator") -> tuple[str, int]:
    """Host (IPv6 without its brackets) and port of `host:port`.

    Args:
        address: `node017:61452`, `10.0.0.7:29400` or `[::1]:29400`.
        name: what the address is, for the message: `REPLICAX_COORDINATOR`.

    Raises:
        ConfigError: no host, no port, a port out of 1 to 65535, or IPv6 without brackets.
    """
    host, colon, port = address.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    if bracketed:
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


def whole_port(text: str, name: str, shown: str | None = None) -> int:
    """The port that `text` holds.

    Args:
        text: the port's digits.
        name: the variable or argument it came from, for the message.
        shown: the whole value of that variable, where the port is a part of it.

    Raises:
        ConfigError: not a whole number from 1 to 65535.
    """
    if not (text.isascii() and text.isdigit()) or not 1 <= int(text) <= 65535:
        raise ConfigError(
            f"{name}={text if shown is None else shown} has the port {text!r}; "
            "a port is a whole number from 1 to 65535: change it"
        )
    return int(text)
