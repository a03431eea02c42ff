import pytest
from hypothesis import given
from hypothesis import strategies as st

from replicax.text.wording import (
    UNKNOWN,
    duration,
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


@given(st.floats(0, 1e30))
def test_no_number_is_long(value: float) -> None:
    assert len(number_text(value)) <= 7


@given(st.floats(1e-7, 9.9e14))
def test_a_short_number_is_right_to_half_a_hundredth(value: float) -> None:
    written = number_text(value).replace(",", "")
    size = {"M": 1e6, "G": 1e9, "T": 1e12}.get(written[-1], 1.0)
    assert float(written.rstrip("MGT")) * size == pytest.approx(value, rel=0.0051, abs=0.0051)


def test_quantities_have_three_digits_in_the_unit_that_fits() -> None:
    sizes = [size_text(size) for size in (999, 999_600, 65_536, 4.6e9, 3e16)]
    assert sizes == ["999 B", "1 MB", "65.5 kB", "4.6 GB", "3e+04 TB"]
    times = [time_text(seconds) for seconds in (2.1e-6, 0.00099996, 0.0453, 75, 7200, 7.2e6)]
    assert times == ["2.1 µs", "1 ms", "45.3 ms", "1 min 15 s", "2 h 00 min", "2,000 h"]
    long = [duration(seconds) for seconds in (9.94, 59.4, 3599.9)]
    assert long == ["9.9 s", "59 s", "1 h 00 min"]
    assert [percent(share) for share in (0.974, 0.004, None)] == ["97%", "0.4%", UNKNOWN]
    assert part_text(11.2e9, 16.9e9) == "11.2 of 16.9 GB"
    assert part_text(340e6, 16.9e9) == "340 MB of 16.9 GB"
