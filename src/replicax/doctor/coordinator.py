"""Whether the processes can come to process 0, before any of them tries to join."""

import errno
import os
import socket
import time
from collections.abc import Callable, Mapping

from replicax.cluster.address import split_address
from replicax.cluster.meeting import bind, is_loopback, reach
from replicax.cluster.place import Place
from replicax.doctor.row import OK, PROBLEM, SKIPPED, WARNING, Row, parted
from replicax.errors import ClusterError

CHECK = "coordinator"
# gRPC, which JAX's runtime speaks, takes the first of these that is set, and knows no capitals;
# the capitals are what other programs read, and tell that this network has a proxy.
_PROXIES = ("grpc_proxy", "https_proxy", "http_proxy", "GRPC_PROXY", "HTTPS_PROXY", "HTTP_PROXY")
_EXCEPTIONS = ("no_grpc_proxy", "no_proxy", "NO_GRPC_PROXY", "NO_PROXY")


def check_coordinator(
    place: Place | None,
    env: Mapping[str, str],
    timeout_seconds: float,
    say: Callable[[str], None],
) -> list[Row]:
    """Whether process 0 can listen at the coordinator's port, or the others can reach it there.

    Args:
        place: of this process, where it is known.
        env: the environment.
        timeout_seconds: until process 0 counts as not to be reached.
        say: called with a line while it is tried again.
    """
    if place is None:
        return [Row(CHECK, "the place of this process is not known", SKIPPED)]
    if place.coordinator is None:
        return [Row(CHECK, "one process: nobody to meet", SKIPPED)]
    host, port = split_address(place.coordinator)
    if is_loopback(host) and (place.local_processes or place.processes) < place.processes:
        return [
            Row(
                CHECK,
                f"{place.coordinator} is each host itself, and {place.processes} processes are "
                f"not all on one host ({place.local_processes} here)",
                PROBLEM,
                "give the name of process 0's host in REPLICAX_COORDINATOR",
            )
        ]
    if place.process == 0:
        rows = _check_port(place, host, port)
    else:
        rows = _check_way(place, host, port, timeout_seconds, say)
    return [*rows, *check_proxies(host, env)]


def check_proxies(host: str, env: Mapping[str, str]) -> list[Row]:
    """A warning where a proxy is set that takes connections to `host` as well."""
    proxies = [name for name in _PROXIES if env.get(name)]
    if not proxies or is_loopback(host):
        return []
    if any(_is_exempt(host, env.get(name, "")) for name in _EXCEPTIONS):
        return []
    exempt = next((name for name in _EXCEPTIONS if env.get(name)), None)
    but = f" and {exempt}={env[exempt]} does not exempt {host}" if exempt else ""
    verb = "is" if len(proxies) == 1 else "are"
    return [
        Row(
            CHECK,
            f"{', '.join(proxies)} {verb} set{but}: JAX may try to reach process 0 through it",
            WARNING,
            f"no_proxy={','.join(filter(None, [env.get('no_proxy'), host]))}, or unset it",
            {"proxies": proxies},
        )
    ]


def _check_port(place: Place, host: str, port: int) -> list[Row]:
    """Process 0's: whether the port is free, and the name its own."""
    try:
        addresses = _addresses(host)
    except socket.gaierror as error:
        return [
            Row(
                CHECK,
                f"the name {host!r} is not known here ({error.strerror})",
                PROBLEM,
                "correct the name, or give the address of this host in REPLICAX_COORDINATOR",
            )
        ]
    try:
        bind(place).close()
    except ClusterError as error:
        found, fix = parted(str(error))
        return [Row(CHECK, found, PROBLEM, fix)]
    shown = "" if addresses == [host] else f" ({', '.join(addresses)})"
    figures = {"host": host, "port": port, "addresses": addresses}
    if not any(map(_is_own, addresses)):
        return [
            Row(
                CHECK,
                f"{host}{shown} is no address of this host, {socket.gethostname()}, where "
                "process 0 listens",
                WARNING,
                "start process 0 there, or correct REPLICAX_COORDINATOR",
                figures,
            )
        ]
    return [Row(CHECK, f"{host}{shown}, port {port} is free for process 0", OK, figures=figures)]


def _check_way(
    place: Place, host: str, port: int, timeout_seconds: float, say: Callable[[str], None]
) -> list[Row]:
    """Another process's: whether it reaches process 0."""
    started = time.monotonic()
    try:
        reach(str(place.coordinator), started + timeout_seconds, say).close()
    except ClusterError as error:
        found = str(error).replace("; ", ": ", 1) if "; " in str(error) else str(error)
        fix = _fix_of_way(error.__context__, host, port)
        return [Row(CHECK, found, PROBLEM, fix, {"host": host, "port": port})]
    milliseconds = 1e3 * (time.monotonic() - started)
    return [
        Row(
            CHECK,
            f"process 0 is reached at {place.coordinator}",
            OK,
            figures={"host": host, "port": port, "milliseconds": milliseconds},
        )
    ]


def _fix_of_way(error: BaseException | None, host: str, port: int) -> str:
    if isinstance(error, socket.gaierror):
        return "correct REPLICAX_COORDINATOR, or give the address instead of the name"
    if isinstance(error, ConnectionRefusedError):
        return "start process 0, and see its output for why it does not listen"
    names = [name for name in _PROXIES if os.environ.get(name)]
    beside = f"; set no_proxy={host} beside {names[0]}" if names else ""
    return f"let the hosts reach {host} on port {port} and above, or name another network{beside}"


def _is_exempt(host: str, listed: str) -> bool:
    """Whether `host` ends in one of the names, as gRPC and most others read the list."""
    names = [name.strip().lstrip("*") for name in listed.split(",")]
    return any(name and host.endswith(name) for name in names)


def _addresses(host: str) -> list[str]:
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(address[4][0]) for address in found))


def _is_own(address: str) -> bool:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as trial:
            trial.bind((address, 0))
    except OSError as error:
        return error.errno != errno.EADDRNOTAVAIL
    return True
