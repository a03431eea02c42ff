"""Traffic of a step, against sums by hand and programs that XLA compiles."""

import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.figures import figures

import replicax as rx
from replicax.analysis.collectives import sums_bytes
from replicax.analysis.schedule import Collective, Kernel, Schedule, read_schedule
from replicax.core.modes.mode_table import MODES
from replicax.core.placement.layout import LAYOUTS
from replicax.plan.step_traffic import advice, least_wire_bytes, read_traffic


@pytest.mark.parametrize(
    ("layout", "least"),
    [
        ("replicated", 2 * 400 * 3 / 4),
        ("zero1", (400 + 200) * 3 / 4),
        ("fsdp", (400 + 2 * 200) * 3 / 4),
    ],
)
def test_the_least_of_each_layout(layout: str, least: float) -> None:
    assert least_wire_bytes(LAYOUTS[layout], 4, 400, 200) == least
    assert least_wire_bytes(LAYOUTS[layout], 1, 400, 200) == 0


def test_the_least_of_hybrid_sharding() -> None:
    # Between the two devices of a host, then a half of the gradient between 4 hosts.
    least = (400 + 2 * 200) / 2 + 2 * (400 / 2) * 3 / 4
    assert least_wire_bytes(LAYOUTS["fsdp"], 8, 400, 200, copies=4) == least


def collective(kind: str, size: int, **changes: Any) -> Collective:
    settings = {"runs": 1, "asynchronous": False, "devices": None, "shapes": ()}
    return Collective(name="c", kind=kind, bytes=size, op_name="", **{**settings, **changes})


def test_collectives_are_summed_by_kind_and_by_whether_they_are_asynchronous() -> None:
    kernel = Kernel("k", flops=10, bytes=0, runs=3, op_name="")
    schedule = Schedule(
        (
            collective("all-gather", 8),
            collective("all-reduce", 100, runs=3, asynchronous=True, between=(kernel, kernel)),
            collective("all-reduce", 50, asynchronous=True),
            collective("all-reduce", 10, devices=2),
            collective("all-to-all", 999, devices=1),  # with itself
        )
    )
    traffic = read_traffic(schedule, 4, 1e9, seconds=lambda kernel: kernel.flops / 1000)
    first, second, third = traffic.movements
    assert (first.kind, first.count, first.bytes, first.wire_bytes) == ("all-reduce", 4, 350, 525)
    assert first.asynchronous
    assert first.between_seconds == pytest.approx(2 * 3 * 10 / 1000)
    assert (second.kind, second.asynchronous, second.wire_bytes) == ("all-reduce", False, 10)
    assert (third.kind, third.wire_bytes, third.between_seconds) == ("all-gather", 6, 0)
    assert traffic.wire_bytes == 525 + 10 + 6
    assert not traffic.warning


@pytest.mark.parametrize(("size", "warns"), [(100, False), (102, False), (104, True)])
def test_a_warning_beyond_two_in_a_hundred(size: int, warns: bool) -> None:
    traffic = read_traffic(
        Schedule((collective("all-reduce", size),)), 4, 150, mode=MODES["shard_map"]
    )
    assert bool(traffic.warning) == warns
    assert figures(traffic.warning) == (["156", "1.04", "150"] if warns else [])
    assert not warns or re.search(r"156 B, 1\.04 times .*150 B", traffic.warning)
    assert not warns or advice(MODES["shard_map"]) in traffic.warning


def test_one_device_is_never_warned() -> None:
    assert read_traffic(Schedule((collective("all-reduce", 100),)), 1, 0).warning == ""
    assert read_traffic(Schedule(()), 1, 0).share == 1


def test_a_parameter_that_is_reduced_twice_is_named_whatever_the_bytes() -> None:
    table, matrix = jax.ShapeDtypeStruct((500, 8), "f4"), jax.ShapeDtypeStruct((60, 60), "f4")
    shapes = ("bf16[500,8]", "bf16[60,60]")
    params = [table, matrix, matrix]
    twice = (collective("all-reduce", 15_200, shapes=shapes),) * 2
    traffic = read_traffic(Schedule(twice), 4, 1e9, params)
    assert traffic.warning == f"bf16[500,8] is reduced 2 times; {advice(MODES['jit'])}"
    assert not read_traffic(Schedule(twice[:1]), 4, 1e9, params).warning


@pytest.mark.parametrize(
    "changes",
    [
        {"shapes": ("f32[60,60]",), "devices": 1},
        {"shapes": ("f32[16,16]",)},  # small
        {"shapes": ("f32[999,999]",)},  # of no parameter
        {"shapes": ("f32[60,60]",), "kind": "all-gather"},
    ],
    ids=["with itself", "small", "no parameter", "not reduced"],
)
def test_what_is_no_parameter_that_is_reduced_twice(changes: dict[str, Any]) -> None:
    params = [jax.ShapeDtypeStruct(shape, "f4") for shape in ((60, 60), (16, 16))]
    each = dataclasses.replace(collective("all-reduce", 4), **changes)
    assert read_traffic(Schedule((each, each)), 4, 1e9, params).warning == ""


def test_the_advice_of_a_split_layout_is_not_another_mode() -> None:
    """`shard_map` has no split layouts."""
    assert "shard_map" in advice(MODES["jit"], LAYOUTS["replicated"])
    assert "shard_map" not in advice(MODES["jit"], LAYOUTS["fsdp"])


# A program compiled by XLA for 8 CPU devices: a language model with tied embeddings.
ROWS, TOKENS, WORDS, WIDTH = 16, 4, 300, 32
MODEL = {"table": jnp.ones((WORDS, WIDTH)), "w": jnp.ones((WIDTH, WIDTH))}
BATCH = {"tokens": np.ones((ROWS, TOKENS), np.int32)}


def loss(model: Any, batch: Any, key: Any) -> jax.Array:
    x = jnp.tanh(model["table"][batch["tokens"]] @ model["w"])
    scores = jax.nn.log_softmax(x @ model["table"].T)
    return -jnp.mean(scores[..., 0], axis=-1)


def test_jit_reduces_a_tied_embedding_twice_and_is_warned() -> None:
    dp = rx.DataParallel(loss, optax.sgd(0.1), mode="jit")
    text = dp.lower(MODEL, BATCH).compile().as_text() or ""
    params = jax.tree.leaves(MODEL)
    least = least_wire_bytes(dp.layout, 8, sums_bytes(params, 1))
    sent = read_traffic(read_schedule(text), 8, least, params, mode=dp.mode)
    table = 4 * WORDS * WIDTH
    assert sent.wire_bytes - sent.least_bytes == pytest.approx(2 * table * 7 / 8, rel=0.01)
    assert f"f32[{WORDS},{WIDTH}] is reduced 2 times" in sent.warning
    assert advice(MODES["jit"]) in sent.warning
