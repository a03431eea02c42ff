"""Medians, quartiles and ratios."""

import pytest

from replicax.bench.bench_result import efficiencies
from replicax.bench.machine import environment
from replicax.bench.numbers import ratios, spread


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([3.0], (3.0, 3.0, 3.0)),
        ([1.0, 2.0], (1.5, 1.25, 1.75)),
        ([5.0, 1.0, 2.0, 3.0, 4.0], (3.0, 2.0, 4.0)),
    ],
)
def test_quartiles_stay_within_what_was_measured(
    values: list[float], expected: tuple[float, ...]
) -> None:
    assert spread(values) == expected


def test_ratios_are_of_the_same_round() -> None:
    assert ratios([2.0, 9.0], [1.0, 3.0]) == [2.0, 3.0]


def test_strong_efficiency_is_speedup_over_devices() -> None:
    runs = [(4, [2.0, 1.0]), (1, [6.0, 8.0])]
    assert efficiencies("strong", runs) == [[0.75, 2.0], [1.0, 1.0]]


def test_weak_efficiency_is_the_time_kept() -> None:
    assert efficiencies("weak", [(1, [6.0]), (4, [8.0])]) == [[1.0], [0.75]]


def test_without_one_device_the_fewest_are_the_base() -> None:
    assert efficiencies("strong", [(2, [6.0]), (8, [2.0])]) == [[1.0], [0.75]]
    assert efficiencies("strong", []) == []


def test_the_environment_names_hardware_and_versions() -> None:
    found = environment()
    assert {"date", "processor", "cores", "python", "replicax", "jax", "numpy"} <= set(found)
    assert found["cores"] >= 1
    assert found["processor"]
