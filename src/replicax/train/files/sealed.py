"""Small JSON files of a run: sealed with a checksum when written, checked when read."""

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

_T = TypeVar("_T")
CHECKSUM = "checksum"
"""The last entry of a sealed object: the SHA-256 of the others."""
_ENDS_SEALED = re.compile(rb'"[0-9a-f]{64}"\s*\}\s*')


def sealed(content: Mapping[str, Any], **style: Any) -> bytes:
    """Format a JSON object with its checksum, in one line or as `style` tells `json.dumps`."""
    text = json.dumps({**content, CHECKSUM: _digest(content)}, allow_nan=False, **style)
    return f"{text}\n".encode()


def unsealed(data: bytes, kind: type[_T], *, older: bool = False, edited: bool = False) -> _T:
    """Return the JSON object that `sealed` formatted as `data`, without its checksum.

    Args:
        data: contents of a file, which are trusted in nothing.
        kind: the type that the object must have: a dict, or a class that msgspec knows.
        older: whether to accept an object of an earlier version, which has no checksum.
        edited: whether a person may have changed the object: the checksum is then ignored.

    Raises:
        ValueError: `data` is damaged, or not such an object.
    """
    try:
        content = msgspec.convert(json.loads(data), dict[str, Any])
        digest = content.pop(CHECKSUM, None)
        # A damaged name of the checksum must not make the object one of an earlier version.
        has_seal = digest is not None or not older or bool(_ENDS_SEALED.search(data[-80:]))
        if has_seal and not edited and digest != _digest(content):
            raise ValueError("it does not match its own checksum")
        return msgspec.convert(content, kind)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except msgspec.ValidationError as error:
        raise ValueError(str(error)) from error


def _digest(content: Mapping[str, Any]) -> str:
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()
