"""The handshake: both ends of a connection prove that they know the job's secret.

Two first messages carry a random nonce each; a Proof is an HMAC of both and of the role of its
sender, so that it serves for no other connection, and not for the other role. What follows is
neither encrypted nor signed: the network itself is trusted.
"""

import hmac
import secrets

from replicax.net.message import Typed, to_json
from replicax.net.secret import Secret

DIALS, LISTENS = "dials", "listens"
"""Roles in a handshake."""


class Proof(Typed):
    """Proof of the secret: first of the end that dials, then of the one that listens."""

    hmac: str


class Refusal(Typed):
    """The connection ends; a stranger learns nothing of the job."""

    reason: str


class RefusedError(ValueError):
    """The refusal of a connection by the end that listens."""


def nonce() -> str:
    """Return random text for the first message of an end."""
    return secrets.token_hex(16)


def proof(secret: Secret, role: str, hello: Typed, challenge: Typed) -> Proof:
    """Return the proof of who has `role` in the handshake that began with these messages."""
    return Proof(secret.hmac(to_json([role, hello, challenge])))


def check_proof(given: Proof, expected: Proof) -> None:
    """Raise `ValueError` if a proof is not the expected one."""
    if not hmac.compare_digest(given.hmac.encode(errors="replace"), expected.hmac.encode()):
        raise ValueError("the secret differs")
