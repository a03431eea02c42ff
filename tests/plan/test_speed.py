"""The minimum time of a step, against arithmetic by hand on a made-up chip."""

import dataclasses
import math
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import optax
import pytest
from plan.plans import FORMULA

import replicax as rx
from replicax.analysis.hardware import CHIPS, Chip, Interconnect
from replicax.analysis.schedule import Kernel, Schedule, WhileLoop
from replicax.core.placement.mesh import abstract_mesh
from replicax.errors import ConfigError
from replicax.plan.forecast import Transfer
from replicax.plan.memory_formula import MemoryFormula
from replicax.plan.planner import _Planner
from replicax.plan.speed import Work, known_dtype, scaling, speed, work_by_formula, work_of_schedule
from replicax.plan.target import Target

# 100 TFLOP/s in bfloat16 and 50 in float32, 1 TB/s of memory; 100 GB/s to the neighbour, at once.
CHIP = Chip(
    name="made-up",
    title="made-up chip",
    platform="cuda",
    kinds="made-up",
    memory_bytes=10**11,
    usable_bytes=10**11,
    flops_per_second={"bfloat16": 1e14, "float32": 5e13},
    memory_bytes_per_second=1e12,
    inside=Interconnect(1e11, 0.0, "made up"),
    between=Interconnect(1e10, 0.0, "made up"),
    devices_per_host=4,
)
ONE = Target("made-up:1", CHIP, 1, 1)
FOUR = Target("made-up:4", CHIP, 4, 1)
GRADIENT = 10**9
# A ring of four sends 2·3/4 of the gradient at 100 GB/s.
REDUCTION_SECONDS = 2 * 3 / 4 * GRADIENT / 1e11
STATE: MemoryFormula = dataclasses.replace(FORMULA, rows=8, parameters=10**9, optimizer=2 * 10**9)


def step(precision: str = "bfloat16", **settings: Any) -> rx.DataParallel:
    dp = rx.DataParallel(lambda m, b, k: jnp.zeros(8), optax.sgd(0.1), precision=precision)
    return dp.replace(**{"mesh": abstract_mesh(4), **settings})


def by_formula(flops: float, target: Target) -> Work:
    dp = step(mesh=abstract_mesh(target.devices))
    return work_by_formula(flops, STATE, GRADIENT, target, dp)


def test_by_formula_no_step_is_faster_than_its_state_is_read_and_written() -> None:
    # 3 GB and the 8 bytes of the model's other arrays, twice, at 1 TB/s.
    assert by_formula(1.0, ONE).compute_seconds == pytest.approx(2 * (3e9 + 8) / 1e12)


def test_by_formula_nothing_hides_the_reduction() -> None:
    found = speed(by_formula(5e12, FOUR), FOUR, step())
    assert found.step.compute_seconds == pytest.approx(0.05)
    assert found.step.exposed_seconds == pytest.approx(REDUCTION_SECONDS)
    assert found.step.seconds == pytest.approx(0.05 + REDUCTION_SECONDS)


def test_a_step_at_measured_rates_is_beside_the_one_at_the_peaks() -> None:
    h100 = Target("h100:1", CHIPS["h100"], 1, 1)
    dims = (32_768, 768, 2304)
    flops, size = 2 * math.prod(dims), 2957 * 10**9
    product = Kernel("product", flops, 0, 1, "", "bf16", product=dims)
    schedule = Schedule((product, Kernel("copy", 0, size, 1, "")))
    work = work_of_schedule(schedule, h100, 32, "bfloat16")
    dp = step(mesh=abstract_mesh(1))
    found = speed(work, h100, dp, recomputed_share=0.0)
    at_rates = found.at_rates
    assert at_rates is not None
    assert found.step.seconds == pytest.approx(flops / 989.4e12 + size / 3350e9)
    assert at_rates.step.seconds == pytest.approx(flops / 749.488e12 + 1)
    assert at_rates.model_share == pytest.approx(flops / at_rates.step.seconds / 989.4e12)
    assert at_rates.rows_per_second == pytest.approx(32 / at_rates.step.seconds)
    assert speed(work_of_schedule(schedule, ONE, 32, "bfloat16"), ONE, dp).at_rates is None


def test_what_follows_from_the_time_of_a_step() -> None:
    hidden = Transfer("all-reduce", GRADIENT, 0.0, 0.05)
    work = Work(8, 0.05, (hidden,), flops=4e12, compute_share=0.75)
    found = speed(work, FOUR, step(), tokens_per_row=1000)
    assert found.rows == 8
    assert found.step.seconds == pytest.approx(0.05)
    assert found.step.communication_seconds == pytest.approx(REDUCTION_SECONDS)
    assert found.step.exposed_seconds == 0
    assert found.rows_per_second == pytest.approx(8 * 4 / 0.05)
    assert found.tokens_per_second == pytest.approx(1000 * 8 * 4 / 0.05)
    assert found.peak_share == pytest.approx(4e12 / 0.05 / 1e14)
    assert found.compute_share == 0.75
    assert speed(work, FOUR, step("float32")).peak_share == pytest.approx(4e12 / 0.05 / 5e13)
    assert speed(work, FOUR, step()).tokens_per_second is None


def test_by_schedule_each_kernel_takes_the_longer_of_its_two_times() -> None:
    product = Kernel("fusion.1", flops=2e12, bytes=10**9, runs=2, op_name="jit(step)/dot_general")
    copy = Kernel("copy.2", flops=0, bytes=10**10, runs=1, op_name="")
    # Two products of 20 ms each, which read no more than 1 ms; a copy of 10 ms.
    work = work_of_schedule(Schedule((WhileLoop(2, (product,)), copy)), ONE, 16, "bfloat16")
    assert work.rows == 16
    assert work.compute_seconds == pytest.approx(0.05)
    assert work.flops == 4e12
    assert work.transfers == ()
    assert work.compute_share == pytest.approx(0.8)
    named = {kernel.name: (kernel.share, kernel.bound) for kernel in work.kernels}
    assert named == {
        "jit(step)/dot_general": (pytest.approx(0.8), "compute"),
        "copy.2": (pytest.approx(0.2), "memory"),
    }


def test_a_chip_whose_speed_is_not_known_is_said_to_be() -> None:
    unknown = dataclasses.replace(CHIP, flops_per_second={})
    with pytest.raises(ConfigError, match=r"made-up chip: peak .*32 is not"):
        by_formula(1.0, dataclasses.replace(ONE, chip=unknown))
    joined = dataclasses.replace(FOUR, chip=dataclasses.replace(CHIP, inside=None))
    with pytest.raises(ConfigError, match=r"made-up:4: .*made-up chips\b.*not known"):
        speed(by_formula(1.0, joined), joined, step())


def weak(found: Any, devices: int) -> Any:
    return next(point for point in found.weak if point.devices == devices)


def test_the_curves_go_through_the_target() -> None:
    found = scaling(by_formula(5e12, FOUR), FOUR, abstract_mesh(4), None)
    assert weak(found, 4).step.seconds == pytest.approx(0.05 + 0.015)
    assert weak(found, 4).efficiency == pytest.approx(0.05 / 0.065)
    here = next(point for point in found.strong if point.devices == 4)
    assert here.step == weak(found, 4).step
    assert found.strong[-1].devices == 32  # of the same batch, each has one row


def test_more_devices_pay_to_the_critical_batch_alone() -> None:
    """Nothing is sent; the remaining loss is that a large batch saves few steps."""
    work = Work(8, 0.05, (), 5e12)
    mesh = abstract_mesh(4)
    free, bound = scaling(work, FOUR, mesh, None), scaling(work, FOUR, mesh, 320.0)
    assert free.weak_pays == free.weak[-1].devices
    # From n/2 devices of 8 rows to n, the steps of the same seconds fall from 1 + 80/n to 1 + 40/n:
    # by a factor of 1.1 or more while n <= 360.
    assert bound.weak_pays == 256


@pytest.mark.parametrize(
    ("precision", "rates", "dtype"),
    [
        ("bfloat16", {"bfloat16": 1.0, "float32": 1.0}, "bfloat16"),
        ("float32", {"bfloat16": 1.0, "float32": 1.0}, "float32"),
        ("bfloat16", {"float32": 1.0}, "float32"),
        ("bfloat16", {}, "float32"),
        ("float16", {"float32": 1.0, "float16": 1.0}, "float16"),
        ("float16", {"bfloat16": 1.0, "float32": 1.0}, "float32"),
    ],
)
def test_the_dtype_whose_peak_counts(precision: str, rates: dict[str, float], dtype: str) -> None:
    chip = dataclasses.replace(CHIP, flops_per_second=rates)
    assert known_dtype(step(precision), chip) == dtype


@pytest.mark.parametrize("more", [0, 1])
def test_a_query_whose_gradients_cudnn_gets_wrong_is_refused(more: int) -> None:
    attention = Kernel("attend", 1, 1, 1, "", "bf16", attends="backward", query=2**31 + more)
    compiled = SimpleNamespace(schedule=Schedule((attention,)), program=None)
    steps: Any = SimpleNamespace(step=lambda dp, rows: compiled)
    asking = _Planner(step(), steps, [], [])
    if not more:
        assert asking.asked(8) is compiled
        return
    with pytest.raises(ConfigError, match=r"2,147,483,649 .* 2 .* 2,147,483,648"):
        asking.asked(8)
