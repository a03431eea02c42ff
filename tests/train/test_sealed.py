"""Sealed JSON is read as it was written; whatever else is there is refused in one line."""

import contextlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.arriving import harmed

from replicax.train.files.sealed import CHECKSUM, sealed, unsealed

VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=4,
).filter(lambda value: "Infinity" not in json.dumps(value))
CONTENTS = st.dictionaries(st.text(max_size=4).filter(lambda n: n != CHECKSUM), VALUES, max_size=3)
STYLES = st.sampled_from([{}, {"indent": 2}])
OTHER_ORDER: dict[str, Any] = {"separators": (",", ":"), "sort_keys": True}


@given(CONTENTS, STYLES)
def test_what_was_sealed_is_read_with_other_line_ends_and_indents_too(
    content: dict[str, Any], style: dict[str, Any]
) -> None:
    data = sealed(content, **style)
    assert unsealed(data, dict[str, Any]) == content
    assert unsealed(data, dict[str, Any], edited=True) == content
    moved = data.replace(b"\n", b"\r\n").replace(b"\n ", b"\n\t")
    assert unsealed(moved, dict[str, Any]) == content


@given(st.data(), CONTENTS, STYLES)
def test_whatever_happens_to_a_sealed_object_it_is_refused_or_the_same(
    data: st.DataObject, content: dict[str, Any], style: dict[str, Any]
) -> None:
    whole = sealed(content, **style)
    damaged = data.draw(harmed(st.just(whole)))
    with contextlib.suppress(ValueError):
        found = unsealed(damaged, dict[str, Any])
        assert json.dumps(found, sort_keys=True) == json.dumps(content, sort_keys=True)
    for cut in range(len(whole) - 2):
        with pytest.raises(ValueError, match=r"\S"):
            unsealed(whole[:cut], dict[str, Any])


@pytest.mark.parametrize("style", [{}, {"indent": 2}, OTHER_ORDER])
def test_no_flipped_bit_passes(style: dict[str, Any]) -> None:
    content = {"rate": 0.1, "layers": [1, 2], "name": "é"}
    data = sealed(content, **style)
    for bit in range(8 * len(data)):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        with contextlib.suppress(ValueError):  # an `e` of an escape may become an `E`
            found = unsealed(bytes(flipped), dict[str, Any])
            assert json.dumps(found, sort_keys=True) == json.dumps(content, sort_keys=True)


def test_an_object_without_a_seal_is_refused() -> None:
    with pytest.raises(ValueError, match="checksum"):
        unsealed(b'{"rate": 0.1}', dict[str, Any])


def test_an_edited_object_keeps_what_was_edited_but_not_the_seal() -> None:
    data = sealed({"rate": 0.1}, indent=2).replace(b"0.1", b"0.2")
    assert unsealed(data, dict[str, Any], edited=True) == {"rate": 0.2}


@given(st.binary(max_size=40) | st.sampled_from([b"[" * 100_000, b"[1]", b"null", b"1" * 5000]))
def test_what_is_no_object_is_one_line(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"\S") as caught:
        unsealed(data, dict[str, Any])
    assert str(caught.value).isprintable()
