"""Plans without a compiler, and plans that are refused."""

import re
from typing import Any

import jax
import numpy as np
import optax
import optax.contrib
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P
from plan.compilers import PACKAGES, beside_jax
from plan.small_step import MODEL, PARAMETERS, WIDTH, host, loss, rows, step, strict
from support.cases import CASES
from support.tiers import only

import replicax as rx
from replicax.errors import ConfigError, install_command
from replicax.plan.advice import REMAT_CHANGE
from replicax.plan.planned import Plan
from replicax.plan.target import parse_target

H100 = parse_target("h100:8").chip


def test_by_formula_where_it_is_asked_for() -> None:
    found = rx.plan(
        step(), MODEL, rows(64), target="h100:8", by_formula=True, wished_rows=1e6, changes={}
    )
    (note,) = found.notes
    assert note.startswith("by formula, ")
    assert found.about["compiler"] is None
    assert not any(need.compiled for need in found.sizes)
    assert found.asked.bytes == found.formula.total
    assert found.formula.parameters == 4 * PARAMETERS
    assert found.traffic is None
    speed = found.speed
    flops = 8 * 2 * (2 * 32 * WIDTH + 3 * WIDTH * WIDTH)
    assert speed.flops == flops
    state = 2 * found.formula.state / (H100.memory_bytes_per_second or 0)
    assert speed.step.compute_seconds == pytest.approx(
        max(state, flops / H100.flops_per_second["float32"])
    )
    assert {point.devices for point in found.scaling.weak} >= {1, 2, 4, 8, 16, 1024}
    assert found.device_hours == pytest.approx(1e6 / speed.rows_per_second * 8 / 3600)
    strict(found)


def test_matrices_without_an_owner_are_updated_on_each_device() -> None:
    def flops(optimizer: Any, layout: str) -> float:
        dp = rx.DataParallel(loss, optimizer, mesh=rx.make_mesh(1), layout=layout)
        given = {"target": "h100:8", "by_formula": True, "changes": {}}
        return rx.plan(dp, MODEL, rows(64), **given).speed.flops

    muon, plain = rx.optimizers.muon(0.1, "first|second"), flops(optax.sgd(0.1), "replicated")
    repeated, owned = flops(muon, "replicated") - plain, flops(muon, "zero1") - plain
    assert repeated == 8 * owned > 0
    assert flops(optax.contrib.muon(0.1), "zero1") - plain == owned  # one of eight slots is used


@pytest.mark.parametrize("by_formula", only([True], [True, False]))
def test_a_custom_step_is_planned(by_formula: bool, request: pytest.FixtureRequest) -> None:
    if not by_formula:
        request.getfixturevalue("in_process")

    def own(state: Any, batch: Any, key: Any) -> Any:
        means, gradient = rx.value_and_grad(loss)(state["model"], batch, key)
        after = jax.tree.map(lambda value, slope: value - 0.1 * slope, state["model"], gradient)
        return {"model": after, "done": state["done"] + 1}, means

    begin = {"model": MODEL, "done": jax.ShapeDtypeStruct((), np.int32)}
    dp = rx.DataParallel(step=own, mode="shard_map", mesh=rx.make_mesh(1))
    found = rx.plan(dp, begin, rows(64), target=host(4), by_formula=by_formula)
    assert found.asked.compiled != by_formula
    assert found.asked.rows == 16
    assert found.asked.fits
    assert 16 < found.largest.rows < 8192
    assert found.formula.parameters == 4 * PARAMETERS + 4
    assert 0.5 < found.formula.total / found.asked.bytes < 2
    assert {each.change for each in found.alternatives} >= {"precision=bfloat16", "layout=fsdp"}
    strict(found)


@pytest.mark.parametrize("mode", only(["pmap"], ["pmap", "jit"]))
def test_by_formula_a_mode_is_planned_for_more_devices_than_there_are(mode: str) -> None:
    def planned(mode: str) -> Plan:
        dp = step(mode=mode)
        return rx.plan(dp, MODEL, rows(64), target="h100:64", by_formula=True, changes={})

    found, equal = planned(mode), planned("shard_map")
    assert found.about["mode"] == mode
    assert (found.asked, found.speeds) == (equal.asked, equal.speeds)


@pytest.mark.promise("plan.by-formula")
def test_a_chip_that_no_compiler_describes_says_so() -> None:
    found = rx.plan(step(precision="bfloat16"), MODEL, rows(64), target="v100:8", changes={})
    assert any(re.search(r"no compiler\b.*NVIDIA V100", note) for note in found.notes)
    assert any(re.search(r"bfloat16 units: .*as float32$", note) for note in found.notes)
    assert not found.asked.compiled
    strict(found)


def test_float16_counts_a_v100s_tensor_cores_and_is_what_is_tried_there() -> None:
    wide, half = (
        rx.plan(step(precision=each), MODEL, rows(64), target="v100:1", changes={})
        for each in ("float32", "float16")
    )
    assert not any("no units" in note for note in half.notes)
    assert [each.change for each in wide.alternatives][:1] == ["precision=float16"]
    assert half.speeds[0].peak_share == pytest.approx(
        half.speeds[0].flops / half.speeds[0].step.seconds / 125e12
    )
    strict(half)


@pytest.mark.parametrize(
    ("target", "platform", "extra"),
    only(
        [("h100:8", "cuda", "plan-gpu")],
        [("h100:8", "cuda", "plan-gpu"), ("v5e:2x4", "tpu", "plan-tpu")],
    ),
)
def test_a_compiler_that_is_missing_is_named_with_its_extra(
    target: str, platform: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if beside_jax(platform):
        pytest.skip(f"{PACKAGES[platform]} is installed beside jax")
    monkeypatch.delenv("PYTHONPATH", raising=False)
    found = rx.plan(step(), MODEL, rows(64), target=target, changes={})
    (note,) = found.notes
    assert note.startswith("by formula: ")
    assert note.endswith(install_command(extra))
    assert not found.asked.compiled


@pytest.mark.parametrize("kind", only(["nnx"], ["pytree", "equinox", "linen", "nnx"]))
def test_the_whole_loss_is_tried_with_checkpoint(kind: str) -> None:
    case = CASES[kind]
    dp = rx.DataParallel(case.loss, optax.sgd(0.1))
    batch = jax.eval_shape(lambda: case.source)
    found = rx.plan(dp, case.model(), batch, target="h100:8", by_formula=True)
    tried = [each.change for each in found.alternatives]
    if kind == "nnx":  # its BatchNorm writes to the model, which a checkpointed function may not
        assert REMAT_CHANGE not in tried
        assert any(
            re.match(rf"{re.escape(REMAT_CHANGE)}: .*not allow", note) for note in found.notes
        )
    else:
        assert REMAT_CHANGE in tried


def test_an_error_in_a_change_of_the_caller_is_not_hidden() -> None:
    reason = "in the loss"

    def broken(model: Any, batch: Any, key: Any) -> jax.Array:
        raise ZeroDivisionError(reason)

    changes = {"broken": step().replace(loss=broken)}
    with pytest.raises(ZeroDivisionError, match=reason):
        rx.plan(step(), MODEL, rows(64), target="h100:8", by_formula=True, changes=changes)


def test_several_processes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    dp = step()
    monkeypatch.setattr(jax, "process_count", lambda: 3)
    with pytest.raises(ConfigError, match="plan on 3 processes"):
        rx.plan(dp, MODEL, rows(16), target="h100:8", by_formula=True)


def test_axes_that_do_not_divide_the_devices_are_refused() -> None:
    mesh = rx.make_mesh(2, model=3, devices=jax.devices()[:6])
    dp = step(mesh=mesh, layout=[("first", P("model", None)), ("", P())])
    with pytest.raises(ConfigError, match=r"8 devices over .*=3; .*\b3\b.*divide"):
        rx.plan(dp, MODEL, rows(16), target="h100:8", by_formula=True)


def test_an_unknown_target_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"hardware 'h10'"):
        rx.plan(step(), MODEL, rows(16), target="h10:8")
    for written in ("H100x8", "8xh100", "h100-8", "8 h100"):
        with pytest.raises(ConfigError, match=r"write h100:8$"):
            rx.plan(step(), MODEL, rows(16), target=written)


def test_a_batch_is_cut_from_a_source() -> None:
    given: dict[str, Any] = {"target": "h100:8", "by_formula": True, "changes": {}}
    data = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), rows(800))
    wanted = rx.plan(step(), MODEL, rows(64), **given)
    several = rx.plan(step(), MODEL, [jax.tree.map(lambda leaf: leaf[:64], data)], **given)
    feed = rx.plan(step(), MODEL, step().feed(data, 64), **given)
    cut = rx.plan(step(), MODEL, data, batch_size=64, **given)
    shapes = rx.plan(step(), MODEL, rows(800), batch_size=64, **given)
    assert [each.asked for each in (several, feed, cut, shapes)] == [wanted.asked] * 4
    assert [each.about["data_rows"] for each in (wanted, feed, shapes)] == [None, 800, 800]


def test_the_address_of_an_error_is_no_part_of_a_note() -> None:
    def mutates(model: Any, batch: Any, key: Any) -> Any:
        return model(batch["x"]).sum(-1)

    norm = nnx.BatchNorm(4, rngs=nnx.Rngs(0))
    dp = rx.DataParallel(mutates, optax.sgd(0.1))
    batch = {"x": np.ones((64, 4), np.float32)}
    notes = rx.plan(dp, norm, batch, target="h100:8", by_formula=True).notes
    (note,) = (each for each in notes if each.startswith("remat"))
    assert "TraceContextError" in note
    assert "http" not in note


@pytest.mark.parametrize("name", ["wished_rows", "noise_scale"])
@pytest.mark.parametrize("value", [0, -1.5, float("nan"), float("inf")])
def test_rows_that_are_none_are_refused_before_anything_compiles(name: str, value: float) -> None:
    with pytest.raises(ConfigError, match=rf"{name}={value:g}; .*(above 0|number)"):
        rx.plan(step(), MODEL, rows(16), target="h100:8", **{name: value})
