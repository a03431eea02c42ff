"""First advice and the cost of another batch: every branch, with made-up needs."""

import dataclasses
import re
from typing import Any

import jax.numpy as jnp
import optax
import pytest
from plan.plans import ABOUT, GB, SPEED, TRAFFIC, make_plan, need

import replicax as rx
from replicax.core.placement.mesh import abstract_mesh
from replicax.plan.advice import batch_advice, first_change
from replicax.plan.forecast import StepTime
from replicax.plan.planned import Alternative, MicroBatches, Need, Speed

DEVICES = 256
BFLOAT16 = "precision=bfloat16"


def speed(rows: int, rows_per_second: float, waiting: float = 0.0) -> Speed:
    """Return the speed of a step of one second that waits for a share of it."""
    step = StepTime(1.0, 1.0 - waiting, waiting, waiting)
    return dataclasses.replace(SPEED, rows=rows, step=step, rows_per_second=rows_per_second)


def step(**settings: Any) -> rx.DataParallel:
    return rx.DataParallel(lambda m, b, k: jnp.zeros(8), optax.sgd(0.1), **settings)


def first(asked: Need, **changes: Any) -> str:
    fields: dict[str, Any] = {
        "asked": asked,
        "largest": need(8, 11.0),
        "alternatives": (),
        "traffic": None,
        "speeds": (speed(8, 100.0),),
        **changes,
    }
    dp = fields.pop("dp", step())
    return first_change(dp.replace(mesh=abstract_mesh(DEVICES)), make_plan("v5e:16x16", **fields))


FITS, TOO_LARGE = need(8, 11.0), need(64, 81.0)
REMAT = Alternative("remat", need(64, 15.0), 66 * GB)
FSDP = Alternative("layout=fsdp", need(64, 14.0), 67 * GB)


def test_micro_batches_that_are_filled_up_are_told_as_they_are_computed() -> None:
    fitting = MicroBatches(4, need(12, 11.4))
    said = first(need(10, 81.0), micro_batches=fitting, alternatives=(REMAT,))
    assert said.startswith("accumulate=4: ")  # before what changes the step
    assert re.search(r"micro-batches of 3 rows", said)


def test_then_the_change_that_fits_and_needs_least() -> None:
    less = need(64, 13.0, fits=False)  # the compiler underestimates
    still = Alternative(BFLOAT16, less, 68 * GB)
    said = first(TOO_LARGE, largest=None, alternatives=(still, REMAT, FSDP))
    assert said.startswith("layout=fsdp: ")
    assert re.search(r"with 14 GB", said)


def test_a_change_near_the_limit_is_to_be_compiled() -> None:
    near = dataclasses.replace(FSDP, unclear=True)
    assert first(TOO_LARGE, largest=None, alternatives=(near, REMAT)).startswith("remat: ")
    said = first(TOO_LARGE, largest=None, alternatives=(near,))
    assert said.endswith("--compile-alternatives layout=fsdp")


def test_then_a_smaller_batch() -> None:
    assert re.fullmatch(r"a batch .*2,048 rows, 8 per\b.*device, fits", first(TOO_LARGE))


def test_then_nothing_but_hardware() -> None:
    assert re.match(r"more memory\b.* or a\b.*smaller model", first(TOO_LARGE, largest=None))


def test_without_a_known_speed_no_change_is_made_up() -> None:
    assert re.search(r"speed is .*known", first(FITS, speeds=()))


@pytest.mark.parametrize(
    ("other", "steps", "larger"),
    [
        (speed(32, 250.0), 10, True),
        (speed(32, 250.0), 9, False),
        (speed(32, 109.0), 10, False),
        (speed(4, 250.0), 10, False),
    ],
    ids=["faster", "few steps an epoch", "hardly faster", "smaller"],
)
def test_a_larger_batch_where_it_is_faster(other: Speed, steps: int, larger: bool) -> None:
    rows = {**ABOUT, "data_rows": steps * 32 * DEVICES}
    said = first(FITS, speeds=(speed(8, 100.0), other), about=rows)
    assert bool(re.match(r"a batch\b.* 8,192 rows, 32 .*: up to 2\.5 times", said)) == larger
    assert said.startswith("a batch of") == larger


WAITING = (speed(8, 100.0, waiting=0.4),)


@pytest.mark.parametrize(
    ("gigabytes", "waiting", "fewer"), [(0.1, 0.9, True), (0.1, 0.4, False), (11.0, 0.9, False)]
)
def test_a_step_that_is_too_small_for_the_target(
    gigabytes: float, waiting: float, fewer: bool
) -> None:
    """If 64 devices are enough, and have the memory for all of it."""
    stages = Alternative("stage=2", need(8, gigabytes), 0, step_seconds=0.1)
    speeds = (speed(8, 100.0, waiting), speed(32, 110.0))
    said = first(need(8, gigabytes), speeds=speeds, alternatives=(stages,))
    assert bool(re.match(r"use 64 devices, or .* 256\b.* 90%", said)) == fewer
    assert said.startswith("stage=2: ") != fewer


def test_shard_map_where_mode_jit_sends_twice_and_waits() -> None:
    said = first(FITS, traffic=TRAFFIC, speeds=WAITING)
    assert said.startswith("mode=shard_map: ")
    assert re.search(r"sends 50% of .*40% of a\b.*waits for\b.*network$", said)


@pytest.mark.parametrize(
    "changes",
    [
        {"dp": step(mode="shard_map")},
        {"dp": step(layout="fsdp")},  # which shard_map has not
        {"dp": step(layout="zero1")},
        {"traffic": None},
        {"traffic": dataclasses.replace(TRAFFIC, least_bytes=TRAFFIC.wire_bytes)},
        {"speeds": (speed(8, 100.0, waiting=0.05),)},
    ],
    ids=["shard_map already", "fsdp", "zero1", "no traffic", "no more than the least", "hidden"],
)
def test_no_shard_map_where_it_cannot_help(changes: dict[str, Any]) -> None:
    assert "shard_map" not in first(FITS, **{"traffic": TRAFFIC, "speeds": WAITING, **changes})


def test_the_change_that_is_fastest() -> None:
    half = Alternative(BFLOAT16, need(8, 7.5), 3_500_000_000, step_seconds=0.5)
    slower = Alternative("layout=zero1", need(8, 7.0), 4 * GB, step_seconds=0.8)
    said = first(FITS, alternatives=(slower, half, slower))
    assert said.startswith("precision=bfloat16: ")
    assert re.search(r"up to 2\.0 times as\b.*fast, 3\.5 GB less", said)
    more = dataclasses.replace(half, freed_bytes=-1)
    assert re.fullmatch(
        r"precision=bfloat16: up to 2\.0 times as\b.*fast", first(FITS, alternatives=(more,))
    )
    larger = (speed(8, 100.0), speed(64, 150.0))
    assert first(FITS, alternatives=(half,), speeds=larger) == said
    assert first(FITS, alternatives=(slower,), speeds=larger).startswith("a batch of")


@pytest.mark.parametrize(
    "change",
    [
        Alternative(BFLOAT16, need(8, 7.5), GB),
        Alternative(BFLOAT16, need(8, 7.5), GB, step_seconds=0.95),
        Alternative(BFLOAT16, need(8, 99.0, fits=False), -GB, step_seconds=0.5),
    ],
    ids=["nobody knows", "hardly faster", "does not fit"],
)
def test_no_change_that_is_not_faster(change: Alternative) -> None:
    assert first(FITS, alternatives=(change,)).startswith("nothing: ")


def test_fewer_devices_where_all_else_is_done_and_it_waits() -> None:
    said = first(FITS, dp=step(precision="bfloat16"), speeds=WAITING)
    assert said.startswith("fewer devices")
    assert re.search(r" or faster\b.*links: 40% of a\b.*waits for\b.*network$", said)


def test_learning_rates_of_another_batch() -> None:
    same, larger = batch_advice(64, [64, 256, 64], None)
    assert (same.batch_size, same.linear, same.square_root) == (64, 1.0, 1.0)
    assert (larger.batch_size, larger.linear, larger.square_root) == (256, 4.0, 2.0)
    assert larger.steps is larger.examples is None


def test_the_noise_scale_tells_what_a_batch_costs() -> None:
    (found,) = batch_advice(64, [256], 1024.0)
    # McCandlish et al. 2018: steps as 1 + B_crit/B, rows as 1 + B/B_crit.
    assert found.steps == 1 + 1024 / 256
    assert found.examples == 1 + 256 / 1024
    (critical,) = batch_advice(64, [1024], 1024.0)
    assert (critical.steps, critical.examples) == (2, 2)
