"""The options of a step: one declaration, the same flags in every command."""

import dataclasses
import inspect
from typing import Any

import pytest
from support.command_line import Main, refusal

import replicax as rx
from replicax.cli import step_options
from replicax.cli.bench import BenchOptions
from replicax.cli.plan import PlanOptions
from replicax.cli.step_options import DeviceOptions, ModeOptions, StepOptions
from replicax.cli.train import ComputeOptions
from replicax.cli.verify import VerifyOptions
from replicax.core.placement.layout import LAYOUTS
from replicax.recipes.linear_regression import LinearRegression
from replicax.recipes.mlp import MLP

SHARED = {
    field.name
    for shared in (StepOptions, ModeOptions, DeviceOptions)
    for field in dataclasses.fields(shared)
}
OWN = {"bench": {"mode", "devices"}, "plan": {"devices"}, "train": set(), "verify": set()}
"""Shared names without a flag in a command, or with another one."""
OPTIONS = {
    "bench": BenchOptions,
    "plan": PlanOptions,
    "train": ComputeOptions,
    "verify": VerifyOptions,
}


def test_the_shared_names() -> None:
    assert {"mode", "layout", "accumulate", "micro_shards", "precision", "reduction"} < SHARED
    assert "devices" in SHARED


@pytest.mark.parametrize("command", OPTIONS)
def test_no_command_declares_a_shared_option_again(command: str) -> None:
    again = SHARED & set(inspect.get_annotations(OPTIONS[command]))
    assert again <= OWN[command]
    fields = {field.name for field in dataclasses.fields(OPTIONS[command])}
    assert fields >= SHARED - OWN[command]


def test_the_options_are_arguments_of_data_parallel_with_its_defaults() -> None:
    settings = StepOptions().settings(LinearRegression())
    defaults = inspect.signature(rx.DataParallel).parameters
    for name, value in settings.items():
        default = defaults[name].default
        assert value == (LAYOUTS[default] if name == "layout" else default), name
    assert inspect.signature(rx.DataParallel).parameters["mode"].default == ModeOptions().mode


def test_every_option_reaches_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}
    monkeypatch.setattr(rx, "DataParallel", lambda *_, **options: given.update(options))
    options = StepOptions(
        layout="fsdp",
        model_parallel=2,
        stages=2,
        schedule="gpipe",
        accumulate=2,
        micro_shards=16,
        precision="bfloat16",
        reduction="bfloat16",
    )
    mesh, job, recipe = object(), object(), MLP()
    options.data_parallel(recipe, "jit", mesh, job)  # type: ignore[arg-type]
    assert given == {
        "mesh": mesh,
        "job": job,
        "mode": "jit",
        "layout": rx.layout("fsdp", rules=recipe.rules(), schedule="gpipe"),
        "accumulate": 2,
        "micro_shards": 16,
        "precision": "bfloat16",
        "reduction": "bfloat16",
    }


@pytest.mark.parametrize(
    ("flags", "devices", "shape"),
    [
        ({}, None, None),
        ({}, 2, {"data": 2, "model": 1, "stage": 1}),
        ({"model_parallel": 2}, None, {"data": 4, "model": 2, "stage": 1}),
        ({"model_parallel": 2, "stages": 2}, 4, {"data": 1, "model": 2, "stage": 2}),
        (
            {"layout": "fsdp", "fsdp_size": 2, "model_parallel": 2},
            8,
            {"data": 2, "fsdp": 2, "model": 2, "stage": 1},
        ),
    ],
)
def test_the_mesh_has_the_axes_that_were_asked_for(
    flags: dict[str, Any], devices: int | None, shape: dict[str, int] | None
) -> None:
    mesh = StepOptions(**flags).mesh(devices)
    assert shape == (None if mesh is None else dict(mesh.shape))


def test_bench_takes_no_mesh(main: Main) -> None:
    assert "--layouts" in refusal(main, "bench", "mlp", "--model-parallel", "2")


@pytest.mark.promise("exact.refuses-what-it-cannot-hold")
@pytest.mark.parametrize(
    ("modes", "threads"), [(["jit"], []), (["exact"], [16]), (["pmap", "exact"], [16]), ([], [])]
)
def test_threads_are_fixed_for_modes_whose_bits_are(
    modes: list[str], threads: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    fixed: list[int] = []
    monkeypatch.setattr(step_options, "fix_threads", fixed.append)
    StepOptions(micro_shards=16).fix_threads(*modes)
    assert fixed == threads
