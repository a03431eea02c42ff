"""Plans of small steps, against the same steps really compiled, and against sums by hand."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from plan.small_step import MODEL, PARAMETERS, ROOM, WIDTH, host, loss, rows, step, strict
from support.tiers import EXHAUSTIVE, only

import replicax as rx
from replicax.analysis.compiled import Memory, read_memory
from replicax.errors import ConfigError
from replicax.plan.largest import CLOSE_ENOUGH
from replicax.plan.planned import FORMULA_ERROR, LATER_PARTS, Plan
from replicax.train.guarded import guarded

SPLIT = [("second", P("model", None)), ("", P())]


def compiled(dp: rx.DataParallel, devices: int, rows_of_each: int, **settings: Any) -> Memory:
    """The memory of a step of `rx.fit`."""
    mesh = rx.make_mesh(devices, devices=jax.devices()[:devices])
    other = dp.replace(mesh=mesh, **settings)
    other = guarded(other, other.abstract_state(MODEL))
    found = read_memory(other.lower(MODEL, rows(devices * rows_of_each)).compile())
    assert found is not None
    return found


def assert_as_compiled(found: Plan, dp: rx.DataParallel, room: int = ROOM) -> None:
    """Check that the largest batch fits, and the next one does not."""
    devices = found.target.devices
    for need in filter(None, (found.asked, found.largest, found.too_large)):
        memory = compiled(dp, devices, need.rows)
        assert need.fits == (memory.peak <= room)
        if not need.compiled:
            assert need is found.too_large
            continue
        # An exported step keeps the rows' numbers, 4 bytes each, which a run leaves out.
        assert memory.peak <= need.bytes <= memory.peak + 4 * need.rows
        assert need.temporaries == memory.peak - memory.arguments
    assert found.largest.fits
    assert not found.too_large.fits
    assert found.too_large.rows <= found.largest.rows * (1 + 1.5 / CLOSE_ENOUGH) + 1


@EXHAUSTIVE
def test_a_compiler_of_its_own_says_what_the_run_will() -> None:
    dp, said = step(), []
    found = rx.plan(dp, MODEL, rows(16), target=host(2), changes={}, show=said.append)
    assert found.fits
    assert found.asked.rows == 8
    assert_as_compiled(found, dp)
    assert found.about["compiler"].startswith("jaxlib ")
    assert found.speed.rows_per_second > 0  # measured on this host
    assert any("largest batch" in line for line in said)
    assert not found.notes


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("mode", only(["jit"], ["jit", "shard_map"]))
def test_what_fits_and_how_fast(mode: str) -> None:
    dp = step(mode=mode)
    found = rx.plan(
        dp,
        MODEL,
        rows(16),
        target=host(2),
        changes={},
        tokens_per_row=10,
        wished_rows=1e9,
        noise_scale=48.0,
    )
    assert_as_compiled(found, dp)
    assert found.sizes == tuple(sorted(found.sizes, key=lambda need: need.rows))
    now, most = found.speeds
    assert (now.rows, most.rows) == (8, found.largest.rows)
    # Forward two products, backward three: no gradient is taken of the rows.
    assert now.flops == 8 * 2 * (2 * 32 * WIDTH + 3 * WIDTH * WIDTH)
    assert now.rows_per_second == pytest.approx(2 * 8 / now.step.seconds)
    assert now.tokens_per_second == pytest.approx(10 * now.rows_per_second)
    assert found.device_hours == pytest.approx(1e9 / now.rows_per_second * 2 / 3600)
    asked, larger = found.batches
    assert (asked.batch_size, asked.steps, asked.examples) == (16, 1 + 48 / 16, 1 + 16 / 48)
    assert larger.batch_size == 2 * most.rows
    assert larger.linear == pytest.approx(2 * most.rows / 16)
    assert found.traffic.wire_bytes == 4 * PARAMETERS + 12  # and the loss's three sums
    assert found.scaling is None  # this host has no more devices
    assert not found.notes
    plain = strict(found)
    assert plain["fits"] is True
    assert plain["about"]["parameters"] == PARAMETERS
    assert plain["about"]["noise_scale"] == 48.0
    assert plain["largest"]["rows"] == found.largest.rows


@EXHAUSTIVE
@pytest.mark.usefixtures("alone")
def test_a_batch_far_beyond_the_memory_is_not_compiled() -> None:
    found = rx.plan(step(), MODEL, rows(2 * 4000), target=host(2), changes={})
    assert (found.fits, found.asked.compiled) == (False, False)
    assert found.asked.bytes > 2 * ROOM
    assert found.largest.compiled
    assert found.micro_batches.need.fits


@EXHAUSTIVE
@pytest.mark.usefixtures("alone")
def test_a_batch_that_fits_in_micro_batches() -> None:
    dp = step()
    found = rx.plan(dp, MODEL, rows(2 * 1000), target=host(2), changes={})
    assert not found.fits
    assert_as_compiled(found, dp)
    count, need = found.micro_batches.accumulate, found.micro_batches.need
    assert count >= 1000 / found.largest.rows
    assert need.rows >= 1000
    assert need.rows % count == 0
    assert need.fits
    memory = compiled(dp, 2, need.rows, accumulate=count)
    assert memory.peak <= ROOM
    assert found.first.startswith(f"accumulate={count}: ")
    assert [each.rows for each in found.speeds] == [found.largest.rows]


@EXHAUSTIVE
@pytest.mark.usefixtures("in_process")
def test_not_even_one_row_fits() -> None:
    room = 3 * 4 * PARAMETERS - 1  # parameters and Adam's moments
    found = rx.plan(step(), MODEL, rows(16), target=host(4, room), changes={})
    assert found.largest is None
    assert found.too_large.rows == 1
    assert not found.fits
    assert found.speeds == ()
    assert found.scaling is found.traffic is found.micro_batches is found.device_hours is None
    changes = {each.change: each.need for each in found.alternatives}
    assert {need.rows for need in changes.values()} == {1}  # what makes the least of it fit
    assert found.first.startswith(
        min((need.bytes, change) for change, need in changes.items() if need.fits)[1]
    )
    assert strict(found)["largest"] is None


@pytest.mark.usefixtures("in_process")
def test_a_layout_is_not_compared_with_what_it_is_already() -> None:
    changes = {"twice": step(layout="fsdp", accumulate=2)}
    dp = step(layout="fsdp", precision="bfloat16")
    found = rx.plan(dp, MODEL, rows(16), target=host(2, None), changes=changes)
    assert [each.change for each in found.alternatives] == ["twice"]
    assert "shard_map" not in found.traffic.warning + found.first  # which splits no state
    # To the other device: half of the gradient with the loss's two sums, and of the parameters,
    # twice in bfloat16.
    assert found.traffic.least_bytes == (4 * PARAMETERS + 12 + 2 * 2 * PARAMETERS) / 2


@pytest.mark.usefixtures("in_process")
def test_changes_are_by_formula_but_for_those_that_are_named() -> None:
    given: dict[str, Any] = {"target": host(4, None), "changes": {}, "rules": SPLIT}
    seen: list[Plan] = []
    named = ["layout=fsdp"]
    found = rx.plan(
        step(), MODEL, rows(64), **given, compile_alternatives=named, show_plan=seen.append
    )
    changes = {each.change: each for each in found.alternatives}
    assert {name for name, each in changes.items() if each.need.compiled} == {"layout=fsdp"}
    assert {*changes} == {"precision=bfloat16", "layout=zero1", *named}
    assert any("model=2; model=4. " in note for note in found.notes)  # no figure by formula
    memory = compiled(step(), 4, 16, layout="zero1")
    assert changes["layout=zero1"].need.bytes == pytest.approx(memory.peak, rel=FORMULA_ERROR)
    assert changes["layout=fsdp"].need.bytes == pytest.approx(
        compiled(step(), 4, 16, layout="fsdp").peak, abs=200
    )
    # The first answer is by formula, while the step is compiled.
    assert [(each.asked.compiled, each.left) for each in seen] == [
        (False, ("", *LATER_PARTS)),
        (True, LATER_PARTS),
        (True, LATER_PARTS[1:]),
        (True, ()),
    ]
    with pytest.raises(ConfigError, match=r"'layout=fsd'; .*layout=fsdp, model=2"):
        rx.plan(step(), MODEL, rows(64), **given, compile_alternatives=["layout=fsd"])
    with pytest.raises(ConfigError, match="by_formula"):
        rx.plan(step(), MODEL, rows(64), **given, by_formula=True, compile_alternatives=True)


@pytest.mark.usefixtures("alone")
def test_a_reduction_in_bfloat16_sends_half() -> None:
    dp = step(mode="shard_map", reduction="bfloat16")
    found = rx.plan(dp, MODEL, rows(16), target=host(2, None), changes={})
    assert found.traffic.wire_bytes == found.traffic.least_bytes == 2 * PARAMETERS + 12
    assert found.about["reduction"] == "bfloat16"


@pytest.mark.usefixtures("alone")
def test_of_frozen_parameters_nothing_is_sent() -> None:
    labels = {"first": "frozen", "second": "frozen", "bias": "trained"}
    optimizer = optax.multi_transform(
        {"trained": optax.adam(1e-3), "frozen": optax.set_to_zero()}, labels
    )
    mesh = rx.make_mesh(1, devices=jax.devices())
    dp = rx.DataParallel(loss, optimizer, mesh=mesh, mode="shard_map")
    found = rx.plan(dp, MODEL, rows(16), target=host(2, None), changes={})
    assert found.traffic.wire_bytes == found.traffic.least_bytes == 4 * WIDTH + 12


@pytest.mark.usefixtures("alone")
def test_rows_are_filled_up_to_devices_and_micro_batches() -> None:
    found = rx.plan(step(accumulate=3), MODEL, rows(10), target=host(2, 1_100_000), changes={})
    assert found.asked.rows == 6
    note = "a batch of 10 rows is padded to 12: 2 devices with 6 each"
    assert note in found.notes
    assert all(need.rows % 3 == 0 for need in found.sizes)
    assert found.about["batch_size"] == 10


@pytest.mark.usefixtures("alone")
def test_pmap_is_planned_as_shard_map() -> None:
    found = rx.plan(step(mode="pmap"), MODEL, rows(16), target=host(2, None), changes={})
    assert any(re.match("mode pmap .*planned as .*shard_map, ", note) for note in found.notes)
    assert found.about["mode"] == "pmap"


@pytest.mark.usefixtures("alone")
def test_a_memory_that_nobody_tells() -> None:
    found = rx.plan(step(), MODEL, rows(16), target=host(2, None), changes={})
    assert found.fits
    assert found.largest is found.too_large is None
    assert any(re.search(r"memory\b.*unknown\b.*what fits", note) for note in found.notes)


@pytest.mark.usefixtures("alone")
def test_the_state_and_the_model_of_the_caller_stay() -> None:
    model = {name: jnp.ones(leaf.shape) / 100 for name, leaf in MODEL.items()}
    batch = {"x": np.ones((16, 32), np.float32)}
    mesh = rx.make_mesh(2, devices=jax.devices()[:2])
    dp = step(mesh=mesh)
    state = dp.init(model)
    rx.plan(dp, model, batch, target=host(4, None), changes={})
    assert dp.mesh == mesh
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves((model, state)))
    assert int(dp.step(state, batch)[0].step) == 1
