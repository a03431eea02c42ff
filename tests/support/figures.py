"""The numbers, names and codes of a text or an error, so that a test need not repeat the words."""

import contextlib
import re
from collections.abc import Iterator

import pytest


def figures(text: str) -> list[str]:
    """Return the numbers of a text in order, as written: `["1,000", "2.5", "1e-06"]`.

    Digits inside a name (`h100`, `float32`) do not count; units are left out.
    """
    return re.findall(r"(?<![\w.])-?\d+(?:,\d{3})*(?:\.\d+)*(?:e[+-]?\d+)?", text)


def assert_mentions(text: str, *parts: object) -> None:
    """Assert that a text has these numbers, names and codes, whatever the words around them."""
    missing = [part for part in map(str, parts) if part not in text]
    assert not missing, f"{missing} not in {text!r}"


def logged(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return what Replicax and asyncio logged.

    Other packages also log in threads that an earlier test left: an MLflow without its server.
    """
    ours = ("replicax", "asyncio")
    return [record.getMessage() for record in caplog.records if record.name in ours]


@contextlib.contextmanager
def refused(
    kind: type[Exception], *parts: object, match: str | None = None
) -> Iterator[pytest.ExceptionInfo[Exception]]:
    """Assert that what is done within is refused in one line that has these parts."""
    with pytest.raises(kind, match=match) as caught:
        yield caught
    assert "\n" not in str(caught.value)
    assert_mentions(str(caught.value), *parts)
