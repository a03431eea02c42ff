"""Small JSON files of a run: sealed with a checksum when written, checked when read."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

_T = TypeVar("_T")
CHECKSUM = "checksum"
"""The last entry of a sealed object: the SHA-256 of the others."""


def sealed(content: Mapping[str, Any], **style: Any) -> bytes:
    """Format a JSON object with its checksum, in one line or as `style` tells `json.dumps`."""
    text = json.dumps({**content, CHECKSUM: _digest(content)}, allow_nan=False, **style)
    return f"{text}\n".encode()


def unsealed(data: bytes, kind: type[_T], *, edited: bool = False) -> _T:
    """Return the JSON object that `sealed` formatted as `data`, without its checksum.

    Args:
        data: contents of a file, which are trusted in nothing.
        kind: the type that the object must have: a dict, or a class that msgspec knows.
        edited: whether a person may have written or changed it: the checksum is then ignored.

    Raises:
        ValueError: `data` is damaged, or not such an object.
    """
    try:
        content = msgspec.convert(json.loads(data), dict[str, Any])
        digest = content.pop(CHECKSUM, None)
        if not edited and digest != _digest(content):
            raise ValueError("it does not match its own checksum")
        return msgspec.convert(content, kind)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except msgspec.ValidationError as error:
        raise ValueError(str(error)) from error


def _digest(content: Mapping[str, Any]) -> str:
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()
