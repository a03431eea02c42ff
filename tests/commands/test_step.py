"""The options of a step: one declaration, the same flags in every command."""

import dataclasses
import inspect
import re
from typing import Any

import pytest
from support.command_line import REGRESSION, Main, one_line

import replicax as rx
from replicax.commands import step
from replicax.commands.bench import BenchOptions
from replicax.commands.plan import PlanOptions
from replicax.commands.step import DeviceOptions, ModeOptions, StepOptions
from replicax.commands.train_options import TrainOptions
from replicax.commands.verify import VerifyOptions
from replicax.core.layout import LAYOUTS
from replicax.core.modes import MODES
from replicax.core.reduction import REDUCTIONS
from replicax.recipes.linear_regression import LinearRegression

SHARED = {
    field.name
    for shared in (StepOptions, ModeOptions, DeviceOptions)
    for field in dataclasses.fields(shared)
}
OWN = {"bench": {"mode", "devices"}, "plan": {"devices"}, "train": set(), "verify": set()}
"""Of the shared names, those that a command has no flag for, or one of its own."""
OPTIONS = {
    "bench": BenchOptions,
    "plan": PlanOptions,
    "train": TrainOptions,
    "verify": VerifyOptions,
}


def help_of(main: Main, command: str) -> dict[str, str]:
    """The text of each flag in the help of a command, on one line."""
    code, out, err = main(command, "linear_regression", "--help")
    assert (code, err) == (0, "")
    text = " ".join(out.replace("│", " ").split())
    return {
        flag: " ".join(words.split())
        for flag, words in re.findall(r" --([a-z][a-z-]+) (.*?\(default: [^)]*\))", text)
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


def test_help_describes_an_option_alike_in_every_command(main: Main) -> None:
    texts = {command: help_of(main, command) for command in OPTIONS}
    for name in SHARED:
        commands = [command for command in OPTIONS if name not in OWN[command]]
        assert len({texts[command][name.replace("_", "-")] for command in commands}) == 1, name


@pytest.mark.parametrize("command", OPTIONS)
def test_what_a_table_gains_is_a_choice_of_every_command(
    command: str, main: Main, monkeypatch: pytest.MonkeyPatch
) -> None:
    for table in (MODES, LAYOUTS, REDUCTIONS):
        monkeypatch.setitem(table, "tenth", next(iter(table.values())))
    code, out, _ = main(command, "linear_regression", "--help")
    assert code == 0
    text = " ".join(out.replace("│", " ").split())
    assert f"--layout {{{','.join(LAYOUTS)}}}" in text
    assert f"--reduction {{{','.join(REDUCTIONS)}}}" in text
    if command in ("bench", "verify"):
        assert f"(any of {', '.join(MODES)}; " in text
    if command != "bench":
        assert f"--mode {{{','.join(MODES)}}}" in text
    assert text.count("tenth") >= 3
    code, _, err = main(command, "linear_regression", "--layout", "ninth")
    assert code == 2
    assert "'tenth'" in one_line(err)


def test_the_options_are_arguments_of_data_parallel_with_its_defaults() -> None:
    arguments = inspect.signature(rx.DataParallel).parameters
    for name, value in {**StepOptions().settings(), "mode": ModeOptions().mode}.items():
        assert arguments[name].default == value, name
    benched = inspect.signature(rx.bench).parameters
    for name, value in StepOptions().settings().items():
        assert benched[name].default == value, name


def test_every_option_reaches_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}
    monkeypatch.setattr(rx, "DataParallel", lambda *_, **options: given.update(options))
    options = StepOptions("fsdp", 2, 16, "bfloat16", "bfloat16")
    mesh, job = object(), object()
    options.data_parallel(LinearRegression(), "jit", mesh, job)  # type: ignore[arg-type]
    assert given == {
        "mesh": mesh,
        "job": job,
        "mode": "jit",
        "layout": "fsdp",
        "accumulate": 2,
        "micro_shards": 16,
        "precision": "bfloat16",
        "reduction": "bfloat16",
    }


@pytest.mark.parametrize(
    ("modes", "threads"), [(["jit"], []), (["exact"], [16]), (["pmap", "exact"], [16]), ([], [])]
)
def test_threads_are_fixed_for_modes_whose_bits_are(
    modes: list[str], threads: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    fixed: list[int] = []
    monkeypatch.setattr(step, "fix_threads", fixed.append)
    StepOptions(micro_shards=16).fix_threads(*modes)
    assert fixed == threads


def test_a_bfloat16_reduction_trains(main: Main) -> None:
    flags = ("--mode", "shard_map", "--reduction", "bfloat16", "--devices", 2)
    code, out, err = main(*REGRESSION, *flags)
    assert (code, err) == (0, "")
    assert "done: 1 steps" in out


def test_a_mode_without_a_reduction_of_its_own_refuses_another(main: Main) -> None:
    code, _, err = main(*REGRESSION, "--reduction", "bfloat16")
    assert code == 2
    for word in ("reduction='bfloat16'", "shard_map"):
        assert word in one_line(err)
