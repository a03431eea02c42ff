"""Medians, quartiles and ratios."""

import dataclasses

import pytest
from bench.results import CASE

from replicax.bench.bench_result import with_efficiency
from replicax.bench.machine import environment
from replicax.bench.numbers import spread


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


@pytest.mark.parametrize(
    ("scaling", "runs", "expected"),
    [
        ("strong", [(4, (2.0, 1.0)), (1, (6.0, 8.0))], [(0.75, 2.0), (1.0, 1.0)]),
        ("weak", [(1, (6.0,)), (4, (8.0,))], [(1.0,), (0.75,)]),
        ("strong", [(2, (6.0,)), (8, (2.0,))], [(1.0,), (0.75,)]),
    ],
)
def test_efficiency_is_relative_to_the_fewest_devices(
    scaling: str, runs: list[tuple[int, tuple[float, ...]]], expected: list[tuple[float, ...]]
) -> None:
    cases = [
        dataclasses.replace(CASE, devices=count, scalings=(scaling,), seconds_per_step=seconds)
        for count, seconds in runs
    ]
    found = [case.efficiency for case in with_efficiency(cases)]
    assert found == [{scaling: each} for each in expected]


def test_the_environment_names_hardware_and_versions() -> None:
    found = environment()
    assert {"date", "processor", "cores", "python", "replicax", "jax", "numpy"} <= set(found)
    assert found["cores"] >= 1
    assert found["processor"]
