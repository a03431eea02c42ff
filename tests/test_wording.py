import pytest

from replicax.wording import counted, duration, first_line, listed, named, size_text


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
    ],
)
def test_size_text(count: float, text: str) -> None:
    assert size_text(count) == text


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
