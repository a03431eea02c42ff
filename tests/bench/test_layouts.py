"""Layouts side by side: their meshes, what is left out, and their measurements."""

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from bench import small
from bench.small import MODEL, MODEL_BYTES, SOURCE, loss, parallel, short
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from support.figures import refused

import replicax as rx
from replicax.bench import run as run_module
from replicax.bench import runner
from replicax.bench.bench_result import Bench, LayoutFigures
from replicax.bench.cases import BenchCase, Placed, notes_on_cases
from replicax.bench.layouts import cases_of_layouts
from replicax.bench.run import bench
from replicax.core.placement.layout import LAYOUTS
from replicax.errors import ConfigError, LossError

__all__ = ["short"]
RULES = rx.layout(rules=[("w", P(None, "model")), ("b", P("model"))])
STACKED = rx.layout(rules=[("", P("stage"))])


def run(*layouts: Any, **options: Any) -> Bench:
    return small.run(layouts=layouts, **{"devices": [2], **options})


def mesh(**axes: int) -> Mesh:
    return rx.make_mesh(**{"data": 1, **axes})


@pytest.mark.parametrize(
    ("layout", "axes", "name"),
    [
        ("replicated", {"data": 4}, "data"),
        ("replicated", {}, "data"),
        ("zero1", {"data": 4}, "zero1"),
        ("fsdp", {"data": 2, "fsdp": 2}, "fsdp data=2 fsdp=2"),
        (RULES, {"model": 4}, "model=4"),
        (RULES, {"data": 2, "model": 2}, "data=2 model=2"),
        (STACKED, {"stage": 4}, "stages=4"),
        (rx.layout("fsdp", rules=RULES.rules), {"data": 2, "model": 2}, "fsdp data=2 model=2"),
    ],
)
def test_a_layout_is_named_with_the_axes_of_its_mesh(layout: Any, axes: Any, name: str) -> None:
    placed = Placed(LAYOUTS.get(layout, layout), mesh(**axes))
    assert str(placed) == name
    assert str(BenchCase("jit", 4, 8, (), placed)) == f"jit {name} on 4 devices"


def at_most(sizes: int, axis: str) -> Callable[[BenchCase], None]:
    def check(case: BenchCase) -> None:
        size = case.placed.mesh.shape[axis]
        if size > sizes:
            raise ConfigError(f"{axis}={size}")

    return check


def test_replicas_are_counted_without_the_axes_of_a_replica() -> None:
    cases, _ = cases_of_layouts(["replicated", "model"], ["jit"], [8], 9, RULES, lambda _: None)
    assert [case.replicas for case in cases] == [8, 1]
    cases, _ = cases_of_layouts(["model"], ["jit"], [8], 9, RULES, at_most(4, "model"))
    (note,) = notes_on_cases(9, cases, 1)
    assert re.fullmatch(r"9 rows .*padded to 10 on 2 replicas", note)


def test_on_one_device_all_layouts_are_one_case_and_none_is_there_twice() -> None:
    names = ["zero1", "fsdp", "zero1"]
    cases, _ = cases_of_layouts(names, ["jit"], [1, 2], 8, "fsdp", lambda _: None)
    assert [(case.mode, str(case.placed), case.devices) for case in cases] == [
        ("jit", "data", 1),
        ("jit", "zero1", 2),
        ("jit", "fsdp", 2),
    ]


@pytest.mark.parametrize(
    ("layouts", "devices", "says"),
    [
        (["fdsp"], [2], "did you mean 'fsdp'"),
        ([], [2], "layouts=()"),
        (["zero1"], [1], "on 1 device"),
    ],
)
def test_layouts_that_mean_nothing_are_refused(layouts: Any, devices: Any, says: str) -> None:
    with refused(ConfigError, says):
        cases_of_layouts(layouts, ["jit"], devices, 8, RULES, lambda _: None)


@pytest.fixture(scope="module")
def result() -> Bench:
    return run("replicated", "zero1", "fsdp", "model", "stages", layout=RULES)


def test_a_speedup_is_over_one_device(result: Bench) -> None:
    one, *others = result.cases
    assert one.efficiency["strong"] == (1.0, 1.0)
    for case in others:
        expected = [
            a / (2 * b) for a, b in zip(one.seconds_per_step, case.seconds_per_step, strict=True)
        ]
        assert case.efficiency["strong"] == pytest.approx(expected)


def test_layouts_are_told_apart_by_what_they_hold_and_send(result: Bench) -> None:
    figures = {case.layout.name: case.layout for case in result.cases[1:] if case.layout}
    whole = figures["data"].state_bytes_per_device
    assert whole - figures["fsdp"].state_bytes_per_device == MODEL_BYTES / 2
    assert whole - figures["model=2"].state_bytes_per_device == MODEL_BYTES / 2
    assert figures["zero1"].state_bytes_per_device == whole  # SGD has nothing to split
    assert figures["data"].sent_bytes == MODEL_BYTES + 12  # and the loss's three sums
    assert result.cases[1].sent_bytes == figures["data"].sent_bytes
    assert 0 < figures["model=2"].sent_bytes < figures["data"].sent_bytes
    assert {each.bubble for each in figures.values()} == {None}
    least = [case.least_sent_bytes for case in result.cases]
    assert least == [0, MODEL_BYTES, None, None, None]


def test_a_pair_is_a_layout_on_another_mesh() -> None:
    def hybrid(devices: int) -> Mesh:
        return rx.make_mesh(devices // 2, fsdp=2, devices=jax.devices())

    result = run(("fsdp", hybrid), devices=[4], rounds=1)
    assert [case.layout and case.layout.name for case in result.cases] == [
        "data",
        "fsdp data=2 fsdp=2",
    ]


def test_a_width_that_does_not_divide_has_replicas_beside_it() -> None:
    rules = rx.layout(rules=[("w", P("model")), ("", P())])  # 6 over 4 devices
    result = run("model", layout=rules, devices=[4], rounds=1)
    assert result.cases[1].name == "jit data=2 model=2"
    assert result.cases[1].rows_per_device == 4


def test_stages_have_the_bubble_of_their_micro_batches() -> None:
    model = {"layers": jnp.full((2, 6, 6), 0.1)}

    def stacked(model: Any, batch: Any, key: Any) -> Any:
        x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), batch["x"], model["layers"])
        return jnp.sum(x**2, axis=1)

    given: dict[str, Any] = {"batch_size": 8, "devices": [2], "rounds": 1, "progress": False}
    dp = parallel(stacked, layout=STACKED, accumulate=4)
    result = bench(dp, model, SOURCE, layouts=["stages"], **given)
    one, two = (case.layout for case in result.cases)
    assert isinstance(one, LayoutFigures)
    assert isinstance(two, LayoutFigures)
    assert (one.bubble, two.name, two.bubble) == (None, "stages=2", pytest.approx(1 / 5))


@pytest.mark.parametrize("error", [ConfigError, LossError])
def test_what_fails_once_compiled_is_left_out_and_forgotten(
    error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare = runner.Runner.prepare
    measured: list[set[Any]] = []

    def broken(self: Any, state: Any) -> Any:
        if self.case.placed.layout.splits_optimizer:
            raise error("too large")
        return prepare(self, state)

    measure = run_module.Measurement.measure

    def watched(self: Any, rounds: int) -> None:
        measured.append({str(placed) for placed in self.states})
        measure(self, rounds)

    monkeypatch.setattr(runner.Runner, "prepare", broken)
    monkeypatch.setattr(run_module.Measurement, "measure", watched)
    result = run("replicated", "fsdp", rounds=1)
    assert [case.name for case in result.cases] == ["jit data", "jit data"]
    left_out = r"jit fsdp on 2 devices .*skipped: too large"
    assert any(re.fullmatch(left_out, note) for note in result.notes)
    assert measured == [{"data"}]


def test_a_fault_that_is_no_layouts_is_raised() -> None:
    broken = parallel(lambda *of: loss(*of) * jnp.nan)
    with pytest.raises(LossError, match=r"loss is\b.* nan"):
        bench(broken, MODEL, SOURCE, batch_size=4, devices=[2], layouts=["zero1"], progress=False)


def test_nothing_left_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_module, "Measurement", None)
    with pytest.raises(ConfigError, match=r"jit replicated .* 1 device skipped") as caught:
        run("stages", batch_size=1, accumulate=2)
    assert "\n" not in str(caught.value)
