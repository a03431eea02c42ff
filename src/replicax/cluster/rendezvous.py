"""Rendezvous of the processes of a job, before any of them uses a device."""

import contextlib
import socket
import time
from collections.abc import Callable
from typing import TypeVar

import msgspec

from replicax.cluster.differences import processes_text
from replicax.cluster.place import Place
from replicax.cluster.watchdog import StuckVerdict
from replicax.cluster.wire import Busy, Connection, Go, Hello, Message, Prove, Tick
from replicax.errors import AgreementError, ClusterError
from replicax.net.address import split_address
from replicax.net.proof import (
    DIALS,
    LISTENS,
    Proof,
    Refusal,
    RefusedError,
    check_proof,
    nonce,
    proof,
)
from replicax.net.secret import Secret
from replicax.net.sockets import bind_port, connect_to

_CONNECT_SECONDS = 5.0
_AGAIN_SECONDS = 0.2
_SAY_SECONDS = 10.0
"""Interval between printed lines while waiting."""
_Kind = TypeVar("_Kind", Prove, Proof)


def bound_socket(place: Place, *, listens: bool = False) -> socket.socket:
    """Return process 0's socket, bound to the coordinator's port.

    `ClusterError` if the port is in use, or the address is not this host's.
    """
    try:
        return bind_port(*split_address(str(place.coordinator)), listens=listens)
    except OSError as error:
        raise ClusterError(
            f"process 0 cannot listen on {place.coordinator}: {error.strerror}{_whose(place)}; "
            "each job needs its own port: stop the other, or set REPLICAX_COORDINATOR to a free one"
        ) from None


def _whose(place: Place) -> str:
    """Return whether a Replicax job uses the port, and whether it is this one."""
    try:
        connection = connect_to(*split_address(str(place.coordinator)), 1.0)
        with contextlib.closing(Connection(connection)) as wire:
            # To who knows the secret, the refusal says who uses the port.
            asks = Hello(place.job, process=-1, processes=0, asks=True)
            _introduce(wire, asks, place.secret, time.monotonic() + 1.0)
    except RefusedError as refused:
        return f" ({refused})"
    except (OSError, ValueError, ClusterError):
        pass
    return ""


def meet(
    coordinator: str,
    hello: Hello,
    secret: Secret,
    timeout_seconds: float,
    say: Callable[[str], None],
) -> tuple[Connection, Go]:
    """Connect to the hub and wait until all processes have joined; `say` which are missing.

    `ClusterError` if the hub cannot be reached or rejects this process, or if a process never
    joined; `AgreementError` if the processes have different versions, flags or settings.
    """
    deadline = time.monotonic() + timeout_seconds
    while True:
        wire = reach(coordinator, deadline, say)
        with contextlib.ExitStack() as closing:
            closing.callback(wire.close)
            try:
                # The hub reports which processes are missing: wait slightly longer than it does.
                if _introduce(wire, hello, secret, deadline + 5.0):
                    go = _wait(wire, deadline + 5.0, say)
                    closing.pop_all()  # the caller closes it
                    return wire, go
            except RefusedError as refused:
                raise ClusterError(f"rejected by process 0: {refused}") from None
            except (OSError, ValueError) as error:
                raise ClusterError(
                    f"{coordinator} was reached, but the program listening there is not process 0 "
                    f"of a Replicax job, or it just ended ({error}); see its output, or use "
                    "another port"
                ) from None
        if time.monotonic() > deadline:
            raise ClusterError(
                f"process 0 at {coordinator} had no place for another connection within "
                f"{timeout_seconds:.0f} s: other programs connect to its port and say nothing; use "
                "another port, or keep them off"
            )
        time.sleep(_AGAIN_SECONDS)


def reach(coordinator: str, deadline: float, say: Callable[[str], None]) -> Connection:
    """Connect to process 0, retrying until `deadline` on the monotonic clock.

    `ClusterError` if that fails; its `__context__` is the system's error.
    """
    host, port = split_address(coordinator)
    said_at = started = time.monotonic()
    while True:
        try:
            timeout = min(_CONNECT_SECONDS, max(deadline - time.monotonic(), 0.1))
            return Connection(connect_to(host, port, timeout))
        except OSError as error:
            now = time.monotonic()
            why = _why(host, error)
            if now > deadline:
                raise ClusterError(
                    f"{socket.gethostname()} could not reach process 0 at {coordinator} within "
                    f"{now - started:.0f} s: {why}"
                ) from None
            if now - said_at > _SAY_SECONDS:
                said_at = now
                say(f"cannot reach process 0 at {coordinator} after {now - started:.0f} s: {why}")
            time.sleep(_AGAIN_SECONDS)


def _introduce(wire: Connection, hello: Hello, secret: Secret, deadline: float) -> bool:
    """Prove the secret to process 0, and let it prove it; return whether it has had a place."""
    hello = msgspec.structs.replace(hello, nonce=nonce())
    if (prove := _answer(wire, hello, Prove, deadline)) is None:
        return False
    own_proof = proof(secret, DIALS, hello, prove)
    if (given := _answer(wire, own_proof, Proof, deadline)) is None:
        return False
    check_proof(given, proof(secret, LISTENS, hello, prove))
    return True


def _answer(wire: Connection, said: Message, kind: type[_Kind], deadline: float) -> _Kind | None:
    """Return the answer to what is said; None if others take the place of this connection."""
    with contextlib.suppress(OSError):  # what it said before it closed tells more
        wire.send(said)
    for answer in wire.receive(max(deadline - time.monotonic(), 0.0)):
        if isinstance(answer, kind):
            return answer
        match answer:
            case Busy():
                return None
            case Refusal(reason):
                raise RefusedError(reason)
        raise ValueError(f"{type(answer).__name__} instead of {kind.__name__}")
    raise ClusterError("process 0 did not start the job in time; see its output")


def _wait(wire: Connection, deadline: float, say: Callable[[str], None]) -> Go:
    """Return the hub's answer once all have joined."""
    said_at = started = time.monotonic()
    while time.monotonic() < deadline:
        for message in wire.receive(timeout_seconds=1.0):
            now = time.monotonic()
            match message:
                case StuckVerdict(reason, blames):
                    raise (ClusterError if blames else AgreementError)(reason)
                case Go():
                    return message
                case Tick(missing) if missing and now - said_at > _SAY_SECONDS:
                    said_at = now
                    say(f"still waiting for {processes_text(missing)} after {now - started:.0f} s")
    raise ClusterError("process 0 did not start the job in time; see its output")


def _why(host: str, error: OSError) -> str:
    if isinstance(error, socket.gaierror):
        return f"the host name {host!r} cannot be resolved ({error.strerror})"
    if isinstance(error, ConnectionRefusedError):
        return "connection refused: process 0 has not started, or failed"
    return f"{error.strerror or error}: a firewall, another network, or a wrong address"
