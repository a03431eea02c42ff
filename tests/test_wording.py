import pytest
from hypothesis import given
from hypothesis import strategies as st

from replicax.wording import (
    UNKNOWN,
    counted,
    duration,
    first_line,
    listed,
    named,
    number_text,
    part_text,
    percent,
    size_text,
    time_text,
)


@pytest.mark.parametrize(
    ("paths", "most", "text"),
    [
        (["a"], 1, "a"),
        (["a", "b", "c"], 1, "a and 2 more"),
        (["a", "b", "c"], 2, "a, b and 1 more"),
        (["a", "b"], 2, "a, b"),
        (["", "b"], 1, "the result and 1 more"),
    ],
)
def test_named(paths: list[str], most: int, text: str) -> None:
    assert named(paths, most) == text


@pytest.mark.parametrize(
    ("number", "noun", "text"),
    [(1, "process", "1 process"), (2, "process", "2 processes"), (0, "node", "0 nodes")],
)
def test_counted(number: int, noun: str, text: str) -> None:
    assert counted(number, noun) == text


@pytest.mark.parametrize(
    ("words", "text"), [(["a"], "a"), (["a", "b"], "a and b"), (["a", "b", "c"], "a, b and c")]
)
def test_listed(words: list[str], text: str) -> None:
    assert listed(words) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (999_600, "1 MB"),
        (65_536, "65.5 kB"),
        (2.5e6, "2.5 MB"),
        (4.6e9, "4.6 GB"),
        (3e16, "3e+04 TB"),
        (-2e6, "-2 MB"),
    ],
)
def test_size_text(count: float, text: str) -> None:
    assert size_text(count) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (64, "64"),
        (0.0123, "0.0123"),
        (1.0, "1.00"),
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
    assert number_text(value) == text


@given(st.floats(0, 1e30))
def test_no_number_is_long(value: float) -> None:
    assert len(number_text(value)) <= 7


@given(st.floats(1e-7, 9.9e14))
def test_a_short_number_is_right_to_half_a_hundredth(value: float) -> None:
    written = number_text(value).replace(",", "")
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


def test_shares_and_parts() -> None:
    assert [percent(share) for share in (0.974, 0.004, 0.0, 1.0)] == ["97%", "0.4%", "0%", "100%"]
    assert percent(None) == UNKNOWN
    assert part_text(11.2e9, 16.9e9) == "11.2 of 16.9 GB"
    assert part_text(340e6, 16.9e9) == "340 MB of 16.9 GB"
    assert counted(1.5, "hour", number_text) == "1.50 hours"


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (0, "0.0 s"),
        (9.94, "9.9 s"),
        (10, "10 s"),
        (59.4, "59 s"),
        (60, "1 min 00 s"),
        (3599.9, "1 h 00 min"),
        (3725, "1 h 02 min"),
        (90061, "25 h 01 min"),
    ],
)
def test_durations_read_well(seconds: float, shown: str) -> None:
    assert duration(seconds) == shown


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ValueError("\n one\n\ntwo"), "ValueError: one"),
        (KeyError(), "KeyError"),
        (ValueError("x" * 300), f"ValueError: {'x' * 185}..."),
    ],
)
def test_first_line(error: Exception, text: str) -> None:
    assert first_line(error) == text
