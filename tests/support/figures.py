"""The numbers and names of a text or an error, so that a test need not repeat the words."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

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


@contextmanager
def refused(error: type[Exception], *parts: object) -> Iterator[None]:
    """Assert that this raises `error`, whose message is one line that has these parts."""
    with pytest.raises(error) as caught:
        yield
    assert "\n" not in str(caught.value)
    assert_mentions(str(caught.value), *parts)
