"""The all-reduce: exact, and timed."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from replicax.core.job import Alone
from replicax.doctor import reduction
from replicax.doctor.reduction import check_reduction, judge_reduction, sizes, timing
from replicax.doctor.row import OK, PROBLEM, SKIPPED, WARNING

KB, MB = 2**10, 2**20


def test_sums_over_eight_devices() -> None:
    (row,) = check_reduction(Alone(), 64 * KB)
    assert row.verdict == OK
    assert row.found.startswith("sums over 8 devices are exact, up to ")
    assert [each["size_bytes"] for each in row.figures["sizes"]] == [4 * KB, 64 * KB]


def test_one_device_has_nothing_to_reduce(monkeypatch: pytest.MonkeyPatch) -> None:
    one = jax.devices()[:1]
    monkeypatch.setattr(jax, "devices", lambda: one)
    (row,) = check_reduction(Alone(), MB)
    assert row.verdict == SKIPPED


@pytest.mark.parametrize("dtype", [jnp.int32, jnp.float32])
def test_a_wrong_sum_is_counted_on_every_device(dtype: Any) -> None:
    trial = reduction._Sum(Mesh(np.asarray(jax.devices()), ("devices",)), 4 * KB, dtype)
    assert trial.wrong() == 0
    right = trial._reduce
    trial._reduce = lambda values: right(values).at[0, 5].add(1)
    assert trial.wrong() == 8


@pytest.mark.parametrize(
    ("largest", "expected"),
    [
        (64 * MB, [4 * KB, 64 * KB, MB, 16 * MB, 64 * MB]),
        (MB, [4 * KB, 64 * KB, MB]),
        (100, [100]),
    ],
)
def test_sizes_grow_to_the_largest(largest: int, expected: list[int]) -> None:
    assert sizes(largest) == expected


def test_bandwidths() -> None:
    found = timing(10**9, 0.5, devices=8)
    assert found.algorithm_bytes_per_second == pytest.approx(2e9)
    assert found.bus_bytes_per_second == pytest.approx(3.5e9)


def test_wrong_sums_are_a_problem_of_their_process() -> None:
    (row,) = judge_reduction([timing(MB, 1e-3, 4)], [0, 3], 4, "cpu", None)
    assert row.verdict == PROBLEM
    assert "wrong" in row.found
    assert row.found.endswith("3 on process 1")


def test_gpus_on_a_slow_network() -> None:
    assert len(judge_reduction([timing(MB, 0.1, 16)], [0, 0], 16, "cpu", None)) == 1
    assert len(judge_reduction([timing(MB, 1e-5, 16)], [0, 0], 16, "gpu", None)) == 1
    _, row = judge_reduction([timing(MB, 0.1, 16)], [0, 0], 16, "gpu", None)
    assert row.verdict == WARNING
    assert "NCCL_DEBUG=INFO" in row.fix


def test_what_takes_too_long_is_left_out_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reduction, "BUDGET_SECONDS", 0.0)
    (row,) = check_reduction(Alone(), MB)
    assert [each["size_bytes"] for each in row.figures["sizes"]] == [4 * KB]
    assert "65.5 kB and above left out" in row.found


def test_what_takes_too_much_memory_is_left_out_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reduction, "_free_bytes", lambda: 8 * MB)
    (row,) = check_reduction(Alone(), MB)
    assert [each["size_bytes"] for each in row.figures["sizes"]] == [4 * KB, 64 * KB]
    assert "1.05 MB and above left out: they take 33.6 MB of memory" in row.found
