"""Curves over device counts, and the count where more devices stop paying."""

import pytest

from replicax.core.placement.mesh import abstract_mesh
from replicax.plan.forecast import (
    MOST_DEVICES,
    PAYING_SPEEDUP,
    ScalingPoint,
    StepTime,
    Transfer,
    devices_that_pay,
    scaling_curve,
)
from replicax.plan.network import network, networks
from replicax.plan.target import parse_target

H100 = parse_target("h100:8")
AT_THE_END = Transfer("all-reduce", 1e9, 1.0, 1.0)


def test_weak_scaling_exposes_the_network_of_each_count() -> None:
    points = scaling_curve(parse_target("h100:24"), 1.0, [AT_THE_END], 4)
    counts = [point.devices for point in points]
    assert counts[:8] == [1, 2, 4, 8, 16, 24, 32, 64]  # among them the target's
    assert counts[-1] == MOST_DEVICES > 10**5
    for point in points[:8]:
        reduced = network(H100.with_devices(point.devices)).time("all-reduce", 1e9)
        assert point.step.exposed_seconds == pytest.approx(reduced)
        assert point.efficiency == pytest.approx(1 / (1 + reduced))
        assert point.rows_per_second == pytest.approx(4 * point.devices / (1 + reduced))


def test_a_scattered_result_is_a_device_s_part() -> None:
    scattered = Transfer("reduce-scatter", 1e8, 1.0, 1.0)
    points = {point.devices: point for point in scaling_curve(H100, 1.0, [scattered], 4)}
    of_16 = network(H100.with_devices(16)).time("reduce-scatter", 0.5e8)
    assert points[16].step.communication_seconds == pytest.approx(of_16)


def test_a_fixed_batch_leaves_less_to_compute() -> None:
    points = scaling_curve(H100, 1.0, [AT_THE_END], 4, fixed_batch=True)
    # 32 rows in all: the last has one on each device.
    assert [point.devices for point in points] == [1, 2, 4, 8, 16, 32]
    assert [point.rows_per_device for point in points] == [32, 16, 8, 4, 2, 1]
    assert [point.step.compute_seconds for point in points] == [8, 4, 2, 1, 0.5, 0.25]
    assert {point.batch_size for point in points} == {32}


def _points(seconds: list[float], rows: float = 1) -> list[ScalingPoint]:
    return [
        ScalingPoint(2**power, rows, StepTime(each, seconds[0], 0, each - seconds[0]))
        for power, each in enumerate(seconds)
    ]


def test_doubling_pays_while_it_is_a_tenth_faster() -> None:
    # Twice the rows in 1.8 times the time is 1.11 times as fast, in 1.9 times 1.05 times as fast.
    assert PAYING_SPEEDUP == 1.1
    assert devices_that_pay(_points([1, 1.8, 1.8 * 1.8])) == 4
    assert devices_that_pay(_points([1, 1.8, 1.8 * 1.9])) == 2
    assert devices_that_pay(_points([1, 1.9, 1.9 * 1.9])) == 1
    # A step that does not pay by itself may lead to one that does: a torus whose rings close.
    assert devices_that_pay(_points([1, 1.9, 1.9])) == 4
    # Doublings that only make up for a loss do not pay: one device is the fastest.
    assert devices_that_pay(_points([1, 100, 101, 102])) == 1


def test_with_a_noise_scale_larger_batches_stop_paying() -> None:
    # Perfect scaling: steps fall as 1 + 8/B, that is 9, 5, 3, 2, 1.5, 1.25, 1.125 with 1, 2, ... 64
    # rows: 1.125 is 1.11 times as fast as 1.25, and 128 rows only 1.06 times as fast as 64.
    perfect = _points([1.0] * 10)
    assert devices_that_pay(perfect) == 512
    assert devices_that_pay(perfect, noise_scale=8) == 64


def test_a_fixed_batch_makes_the_noise_scale_irrelevant() -> None:
    points = scaling_curve(H100, 1.0, [AT_THE_END], 4, fixed_batch=True)
    assert devices_that_pay(points) == devices_that_pay(points, noise_scale=8)


def test_counts_that_are_no_doublings_pay_by_the_same_measure() -> None:
    # TPU v5e come in 1, 4, 8, ...: four times as many must be 1.1² times as fast.
    def curve(speedup: float) -> list[ScalingPoint]:
        return [
            ScalingPoint(1, 4, StepTime(1.0, 1.0, 0.0, 0.0)),
            ScalingPoint(4, 4, StepTime(4 / speedup, 1.0, 0.0, 0.0)),
        ]

    assert devices_that_pay(curve(1.22)) == 4
    assert devices_that_pay(curve(1.20)) == 1


def test_more_devices_are_more_replicas() -> None:
    target, mesh = parse_target("h100:16"), abstract_mesh(4, model=4)
    inside = Transfer("all-reduce", 1e8, 1.0, 1.0, axes=("model",))
    between = Transfer("all-reduce", 1e9, 1.0, 1.0, axes=("data",))
    found = scaling_curve(target, 1.0, [inside, between], 2, mesh=mesh)
    points = {point.devices: point for point in found}
    assert sorted(points)[:5] == [4, 8, 16, 32, 64]  # a replica has four
    near = network(parse_target("h100:4")).time("all-reduce", 1e8)
    assert points[4].step.communication_seconds == pytest.approx(near)
    far = networks(parse_target("h100:64"), abstract_mesh(16, model=4))(("data",))
    both = near + far.time("all-reduce", 1e9)
    assert points[64].step.communication_seconds == pytest.approx(both)
    # 32 rows, or 8 for each replica of 4 devices: of one row each there are 32 replicas.
    strong = scaling_curve(target, 1.0, [inside], 2, mesh=mesh, fixed_batch=True)
    assert [point.devices for point in strong] == [4, 8, 16, 32, 64, 128]
    # A replica's rows, and with them its activations, get fewer.
    half = network(parse_target("h100:4")).time("all-reduce", 0.5e8)
    assert strong[3].step.communication_seconds == pytest.approx(half)
