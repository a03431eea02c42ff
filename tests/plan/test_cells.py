"""Short numbers, and lines that keep to their columns."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replicax.plan.cells import (
    MARGIN,
    WIDTH,
    columns,
    counted,
    line,
    of_text,
    percent,
    short,
    time_text,
)
from replicax.wording import size_text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (3.14159, "3.14"),
        (12.34, "12.3"),
        (131_072, "131,072"),
        (999_999.4, "999,999"),
        (999_999.6, "1.00M"),
        (46_344_000, "46.3M"),
        (463_440_000, "463M"),
        (999_600_000, "1.00G"),
        (2e12, "2.00T"),
        (1e16, "1.0e+16"),
    ],
)
def test_a_number_in_few_characters(value: float, text: str) -> None:
    assert short(value) == text


@given(st.floats(0, 1e30))
def test_no_number_is_long(value: float) -> None:
    assert len(short(value)) <= 7


@given(st.floats(1e-7, 9.9e14))
def test_a_short_number_is_right_to_half_a_hundredth(value: float) -> None:
    written = short(value).replace(",", "")
    size = {"M": 1e6, "G": 1e9, "T": 1e12}.get(written[-1], 1.0)
    assert float(written.rstrip("MGT")) * size == pytest.approx(value, rel=0.0051, abs=0.0051)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0000021, "2.1 µs"),
        (0.00099996, "1 ms"),
        (0.0453, "45.3 ms"),
        (1.2345, "1.23 s"),
        (75.0, "1 min 15 s"),
        (7200.0, "2 h 00 min"),
        (7.2e6, "2,000 h"),
    ],
)
def test_seconds_in_the_unit_that_fits(seconds: float, text: str) -> None:
    assert time_text(seconds) == text


def test_shares_sizes_and_counts() -> None:
    assert [percent(share) for share in (0.974, 0.004, 0.0, 1.0)] == ["97%", "0.4%", "0%", "100%"]
    assert size_text(-2_000_000) == "-2 MB"
    assert of_text(11.2e9, 16.9e9) == "11.2 of 16.9 GB"
    assert of_text(340e6, 16.9e9) == "340 MB of 16.9 GB"
    assert (counted(1, "row"), counted(2_000, "row")) == ("1 row", "2,000 rows")


@given(st.text("ab 1", max_size=300), st.sampled_from(["", "fits", "target"]))
def test_a_text_keeps_to_its_margin(text: str, word: str) -> None:
    for number, each in enumerate(line(word, text)):
        assert len(each) <= WIDTH
        assert each[:MARGIN] == ("" if number else word).ljust(MARGIN)


def test_figures_stand_below_each_other() -> None:
    assert columns("change", [("with", "takes", ""), ("layout=fsdp", "9 GB", "it moves")]) == [
        "change with         takes",
        "       layout=fsdp   9 GB  it moves",
    ]


@given(st.text("xy ", max_size=200), st.text("xy ", max_size=200))
def test_a_long_name_or_text_goes_into_more_lines(name: str, beside: str) -> None:
    drawn = columns("word", [("head", "1", ""), (name, "12 GB", beside)])
    assert max(map(len, drawn)) <= WIDTH
    assert drawn[0].startswith("word   head")
    kept = "".join("".join(drawn[1:]).split())
    assert "".join(name.split()) + "12GB" + "".join(beside.split()) == kept
