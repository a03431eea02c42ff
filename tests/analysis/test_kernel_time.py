"""A schedule on a chip of round numbers."""

import dataclasses

import pytest

from replicax.analysis.hardware import Chip
from replicax.analysis.roofline import kernel_roofline, limits
from replicax.analysis.schedule import Collective, Kernel, Schedule, Wait, WhileLoop
from replicax.plan.forecast import Transfer
from replicax.plan.speed import timeline

CHIP = Chip(
    name="round",
    title="Round",
    platform="cuda",
    kinds="Round",
    flops_per_second={"bfloat16": 1000, "float32": 500},
    memory_bytes_per_second=100,
    devices_per_host=1,
)


def kernel(name: str, flops: int, size: int, runs: int = 1, dtype: str = "bf16") -> Kernel:
    return Kernel(name, flops, size, runs, f"jit(step)/{name}", dtype)


COMPUTING = kernel("computing", 4000, 100)  # 4 s over 1 s
MOVING = kernel("moving", 1000, 300)  # 1 s over 3 s


def reduction(name: str, asynchronous: bool = True) -> Collective:
    return Collective(name, "all-reduce", 64, 1, asynchronous, None, "", ())


@pytest.mark.parametrize(
    ("own", "asked", "seconds"),
    [
        ("bf16", "float32", 4),
        ("f32", "bfloat16", 8),
        ("", "float32", 8),
        ("f16", "bfloat16", 4),  # the chip has no units for it
        ("s8", "float32", 8),
    ],
)
def test_products_run_at_the_peak_of_their_own_dtype(own: str, asked: str, seconds: float) -> None:
    changed = dataclasses.replace(COMPUTING, dtype=own)
    assert kernel_roofline(changed, CHIP, asked).seconds == seconds


def test_transfers_start_and_are_needed_where_the_schedule_says() -> None:
    steps = (COMPUTING, reduction("a"), MOVING, reduction("b", False), Wait("b"), Wait("a"), MOVING)
    seconds, transfers = timeline(Schedule(steps), CHIP)
    assert seconds == 4 + 3 + 3
    assert transfers == (Transfer("all-reduce", 64, 7, 7), Transfer("all-reduce", 64, 4, 7))


def test_transfers_in_a_loop_repeat() -> None:
    body = (reduction("a"), MOVING, Wait("a"), COMPUTING)
    seconds, transfers = timeline(Schedule((COMPUTING, WhileLoop(3, body))), CHIP)
    assert seconds == 4 + 3 * 7
    places = [(each.ready_seconds, each.needed_seconds) for each in transfers]
    assert places == [(4, 7), (11, 14), (18, 21)]


def test_what_limits_a_step() -> None:
    small = [kernel(f"small{n}", n, 0) for n in range(6)]
    many = dataclasses.replace(MOVING, runs=2)
    found = limits(Schedule((COMPUTING, WhileLoop(2, (many,)), *small)), CHIP)
    assert found.seconds == pytest.approx(4 + 2 * 3 + 0.015)
    assert found.compute_share == pytest.approx(4.015 / 10.015)
    names = [each.kernel.name for each in found.top]
    assert names == ["moving", "computing", "small5", "small4", "small3"]
    assert [each.bound for each in found.top[:2]] == ["memory", "compute"]
    assert found.top[0].seconds == 6


def test_nothing_limits_nothing() -> None:
    found = limits(Schedule(()), CHIP)
    assert (found.seconds, found.compute_share, found.top) == (0, 0, ())
