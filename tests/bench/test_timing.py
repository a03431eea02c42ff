"""Medians, quartiles and ratios."""

import dataclasses

import pytest
from bench.results import CASE

from replicax.bench.bench_result import with_efficiency


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
