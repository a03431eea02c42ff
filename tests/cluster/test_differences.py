"""Naming the processes that differ from the others."""

import re

import pytest

from replicax.cluster.differences import field_differences, processes_text


def test_only_the_fields_that_differ_by_their_path() -> None:
    found = field_differences([{"m": {"x": 1, "y": 2}, "n": 0}, {"m": {"x": 1, "y": 3}, "n": 0}])
    assert found == ["m.y is 3 on process 1, 2 on process 0"]


def test_a_field_that_one_lacks() -> None:
    (found,) = field_differences([{}, {"a": None}])
    assert re.fullmatch(r"a is null\b.*process 1, nothing on .* 0", found)


def test_kinds_of_numbers_are_told_apart() -> None:
    assert field_differences([{"a": 1}, {"a": 1.0}])
    assert field_differences([{"a": 1}, {"a": True}])
    assert field_differences([{"a": 1}, {"a": "1"}])


def test_long_values_are_cut() -> None:
    (found,) = field_differences([{"a": "x" * 500}, {"a": "y" * 500}])
    assert len(found) < 250
    assert f"{'x' * 77}..." in found


@pytest.mark.parametrize(
    ("processes", "text"),
    [
        ([1], "process 1"),
        ([2, 0], "processes 0 and 2"),
        ([0, 1], "processes 0 and 1"),
        ([3, 4, 5], "processes 3 to 5"),
        ([0, 2, 5], "processes 0, 2 and 5"),
        (list(range(0, 20, 2)), "processes 0, 2, 4, 6, 8, 10, 12, 14 and 2 more"),
        (list(range(1, 1000)), "processes 1 to 999"),
    ],
)
def test_processes_in_words(processes: list[int], text: str) -> None:
    assert processes_text(processes) == text
