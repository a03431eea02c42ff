"""The secret of a job: only a process that knows it can join."""

import hashlib
import hmac
from collections.abc import Mapping
from pathlib import Path

from replicax.errors import ConfigError

SECRET = "REPLICAX_SECRET"
"""The secret of the job; a process with a different one, or with none, is rejected."""
SECRET_FILE = "REPLICAX_SECRET_FILE"
"""Path of a file with the secret, in place of `SECRET`."""
_LONGEST_BYTES = 4096


class Secret:
    """The key of proofs, which is neither sent nor shown. Without one, anyone can compute them."""

    def __init__(self, key: bytes = b"") -> None:
        self._key = key

    @property
    def is_set(self) -> bool:
        """Whether there is a secret."""
        return bool(self._key)

    def hmac(self, text: bytes) -> str:
        """Return the HMAC of `text`, in hexadecimal digits."""
        return hmac.new(self._key, text, hashlib.sha256).hexdigest()


def find_secret(env: Mapping[str, str]) -> Secret:
    """Return the secret in REPLICAX_SECRET or in the file REPLICAX_SECRET_FILE, if either is set.

    No error shows a part of it.
    """
    if SECRET in env and SECRET_FILE in env:
        raise ConfigError(
            f"{SECRET} and {SECRET_FILE} are both set; one is enough: unset the other"
        )
    key, name = env.get(SECRET, "").encode(errors="surrogateescape"), SECRET
    if path := env.get(SECRET_FILE):
        name = f"{SECRET_FILE}={path}"
        key = _read(Path(path), name)
    key = key.strip()
    if not key and (SECRET in env or SECRET_FILE in env):
        raise ConfigError(f"{name} is empty; it must be the job's secret: set it, or unset it")
    return Secret(key)


def _read(path: Path, name: str) -> bytes:
    if path.exists() and not path.is_file():
        raise ConfigError(f"{name} is not a regular file: name a file with the job's secret")
    try:
        with path.open("rb") as file:
            key = file.read(_LONGEST_BYTES + 1)  # one more tells that there is more
    except OSError as error:
        raise ConfigError(f"{name} cannot be read: {error.strerror}: correct it") from None
    if len(key) > _LONGEST_BYTES:
        raise ConfigError(
            f"{name} has more than {_LONGEST_BYTES} bytes: name a file with the job's secret only"
        )
    return key
