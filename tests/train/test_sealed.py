"""Sealed JSON is read as it was written; a flipped bit is found, even in the seal's name."""

import contextlib
import json
from typing import Any

import pytest

from replicax.train.sealed import CHECKSUM, sealed, unsealed

CONTENT = {"rate": 0.1, "layers": [1, 2], "name": "é"}
SORTED: dict[str, Any] = {"separators": (",", ":"), "sort_keys": True}
"""The seal is not last then, so an object without one cannot be told from it: none is read."""


@pytest.mark.parametrize(
    ("style", "older"), [({}, True), ({"indent": 2}, True), ({"indent": 2}, False), (SORTED, False)]
)
def test_what_was_sealed_is_read_and_no_flipped_bit_passes(
    style: dict[str, Any], older: bool
) -> None:
    data = sealed(CONTENT, **style)
    assert unsealed(data, dict[str, Any], older=older) == CONTENT
    for bit in range(8 * len(data)):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        with contextlib.suppress(ValueError):  # an `e` of an escape may become an `E`
            found = unsealed(bytes(flipped), dict[str, Any], older=older)
            assert json.dumps(found, sort_keys=True) == json.dumps(CONTENT, sort_keys=True)


def test_other_line_ends_and_indents_are_no_damage() -> None:
    data = sealed(CONTENT, indent=2).replace(b"\n", b"\r\n").replace(b"  ", b"\t")
    assert unsealed(data, dict[str, Any]) == CONTENT


def test_an_object_without_a_seal_is_one_of_an_earlier_version() -> None:
    data = b'{"rate": 0.1}'
    assert unsealed(data, dict[str, Any], older=True) == {"rate": 0.1}
    with pytest.raises(ValueError, match="checksum"):
        unsealed(data, dict[str, Any])


def test_an_edited_object_keeps_what_was_edited_but_not_the_seal() -> None:
    data = sealed(CONTENT, indent=2).replace(b"0.1", b"0.2")
    found = unsealed(data, dict[str, Any], edited=True)
    assert (found["rate"], CHECKSUM in found) == (0.2, False)


@pytest.mark.parametrize("data", [b"[" * 100_000, b"\xff", b"", b"[1]", b"null", b"1" * 5000])
def test_what_is_no_object_is_one_line(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"\S") as caught:
        unsealed(data, dict[str, Any], older=True)
    assert str(caught.value).isprintable()
