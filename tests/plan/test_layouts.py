"""Plans of steps whose replicas have several devices, and the cost of each layout."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from plan.small_step import host
from support.tiers import EXHAUSTIVE

import replicax as rx
from replicax.core.placement.mesh import abstract_mesh
from replicax.plan.memory_formula import memory_formula
from replicax.plan.planned import Plan
from replicax.plan.target import parse_target

LAYERS, WIDTH = 4, 64
LAYER = 2 * WIDTH * 4 * WIDTH
PARAMETERS = WIDTH * WIDTH + LAYERS * LAYER
MODEL = {
    "in": jax.ShapeDtypeStruct((WIDTH, WIDTH), np.float32),
    "h": {
        "up": jax.ShapeDtypeStruct((LAYERS, WIDTH, 4 * WIDTH), np.float32),
        "down": jax.ShapeDtypeStruct((LAYERS, 4 * WIDTH, WIDTH), np.float32),
    },
}
RULES = [("up", P("stage", None, "model")), ("down", P("stage", "model")), ("", P())]


def loss(model: Any, batch: Any, key: Any) -> jax.Array:
    def layer(x: jax.Array, own: Any) -> tuple[jax.Array, None]:
        return x + jnp.tanh(x @ own["up"]) @ own["down"], None

    x, _ = lax.scan(layer, jnp.tanh(batch["x"] @ model["in"]), model["h"])
    return jnp.mean(x**2, axis=-1)


def step(layout: Any = "replicated", accumulate: int = 1, **axes: int) -> rx.DataParallel:
    mesh = rx.make_mesh(1, devices=jax.devices(), **axes)
    return rx.DataParallel(loss, optax.adam(1e-3), mesh=mesh, layout=layout, accumulate=accumulate)


def rows(count: int) -> dict[str, jax.ShapeDtypeStruct]:
    return {"x": jax.ShapeDtypeStruct((count, WIDTH), np.float32)}


def planned(dp: rx.DataParallel, devices: int = 8, count: int = 32, **settings: Any) -> Plan:
    return rx.plan(dp, MODEL, rows(count), target=host(devices, None), changes={}, **settings)


@pytest.mark.usefixtures("alone")
def test_devices_that_share_each_layer() -> None:
    found = planned(step(RULES, model=2))
    assert found.mesh == {"data": 4, "model": 2, "stage": 1}
    assert (found.replicas, found.holder, found.asked.rows) == (4, "replica", 8)
    assert found.formula.parameters == 4 * (WIDTH * WIDTH + LAYERS * LAYER // 2)
    sent = {(each.kind, each.axes): each for each in found.traffic.movements}
    # Forward and backward, each layer's partial sums of 8 rows; then the gradient, once. The loss
    # and its weight may be summed over both axes.
    assert sent["all-reduce", ("model",)].bytes - 2 * LAYERS * 8 * WIDTH * 4 in (0, 8)
    assert sent["all-reduce", ("data",)].bytes == found.formula.parameters + 12
    assert found.traffic.least_bytes == 0  # activations have no known minimum
    assert found.speed.rows_per_second == pytest.approx(32 / found.speed.step.seconds)
    # The layers' products are shared, the first one is every device's.
    assert found.speed.flops == 8 * (4 * WIDTH * WIDTH + 6 * LAYERS * LAYER // 2)


@pytest.mark.usefixtures("alone")
def test_the_stages_of_a_pipeline() -> None:
    found = planned(step(RULES, accumulate=4, stage=2), devices=4)
    assert found.mesh == {"data": 2, "model": 1, "stage": 2}
    assert found.formula.parameters == 4 * (WIDTH * WIDTH + LAYERS * LAYER // 2)
    assert found.speed.bubble == 1 / 5
    # 5 of 6 ticks go forward and 5 back, with 4 rows and 2 layers each.
    products = 5 * 4 * (4 * WIDTH * WIDTH + 6 * 2 * LAYER)
    assert found.speed.flops == products
    sent = {(each.kind, each.axes): each.count for each in found.traffic.movements}
    assert sent["collective-permute", ("stage",)] == 2 * 6
    assert sent["all-reduce", ("data",)] >= 1


@EXHAUSTIVE
@pytest.mark.usefixtures("in_process")
def test_what_each_layout_frees_and_costs() -> None:
    found = planned(step(), rules=RULES, compile_alternatives=True)
    changes = {each.change: each for each in found.alternatives}
    assert set(changes) == {
        "precision=bfloat16",
        "layout=zero1",
        "layout=fsdp",
        "model=2",
        "model=4",
        "model=8",
        "stage=2, accumulate=8",
        "stage=4, accumulate=16",
    }
    assert changes["model=4"].need.rows == 4 * found.asked.rows  # as many in all
    split = 3 * 4 * LAYERS * LAYER  # parameters and Adam's moments of the layers
    assert changes["model=2"].freed_bytes > split / 2 - 50_000
    assert changes["model=8"].freed_bytes > changes["model=2"].freed_bytes
    assert changes["stage=4, accumulate=16"].freed_bytes > split / 2
    for each in changes.values():
        assert each.step_seconds is not None
        assert each.step_seconds > 0
        assert each.wire_bytes is not None
    assert changes["layout=fsdp"].wire_bytes is not None
    assert changes["model=8"].wire_bytes != changes["model=2"].wire_bytes


def test_between_hosts_the_state_may_be_split_inside_each() -> None:
    found = rx.plan(
        step(), MODEL, rows(64), target="h100:4x4", changes={}, rules=RULES, by_formula=True
    )
    names = [each.change for each in found.alternatives]
    assert "layout=fsdp, fsdp=4" in names
    assert "stage=4, accumulate=16" in names
    assert not any(name.startswith("model") for name in names)  # only a compiler knows
    one = rx.plan(step(), MODEL, rows(64), target="h100:8", changes={}, by_formula=True)
    assert [each.change for each in one.alternatives] == [
        "precision=bfloat16",
        "layout=zero1",
        "layout=fsdp",
    ]


def test_by_formula_layers_and_stages_take_their_part() -> None:
    def formula(mesh: Any, accumulate: int = 1, layout: Any = RULES) -> Any:
        dp = step(layout).replace(mesh=mesh, accumulate=accumulate)
        return memory_formula(dp, MODEL, rows(64))

    whole = formula(abstract_mesh(4))
    shared, staged = formula(abstract_mesh(4, model=4)), formula(abstract_mesh(4, 1, 4), 4)
    part = 4 * (WIDTH * WIDTH + LAYERS * LAYER // 4)
    assert whole.parameters == 4 * PARAMETERS
    assert shared.parameters == staged.parameters == shared.gradient == part
    assert shared.optimizer == 2 * part + 4
    # 16 rows in 4 micro-batches, of which as many are kept, of a quarter of the layers.
    assert staged.activations == pytest.approx(whole.activations / 4, rel=0.01)
    both = rx.layout("fsdp", rules=RULES)
    assert formula(abstract_mesh(4, model=4), layout=both).parameters == part // 4


def test_the_speed_by_formula_waits_for_the_bubble() -> None:
    target = parse_target("h100:8")
    plans = [
        rx.plan(
            step(RULES, accumulate=micro_batches, stage=4),
            MODEL,
            rows(512),
            target=target,
            changes={},
            by_formula=True,
        )
        for micro_batches in (1, 4)
    ]
    one, four = (each.speed for each in plans)
    assert (one.bubble, four.bubble) == (3 / 4, 3 / 7)
    assert one.flops == four.flops
    assert one.step.compute_seconds * (1 - one.bubble) == pytest.approx(
        four.step.compute_seconds * (1 - four.bubble)
    )
    assert dataclasses.replace(plans[0].target) == target
