"""`replicax plan` as a command."""

import dataclasses
import inspect
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_type_hints

import pytest
from plan.plans import make_plan
from support.command_line import Main, done, refusal
from support.figures import assert_mentions
from support.tiers import EXHAUSTIVE, only

from replicax.analysis.hardware import CHIPS, CPU
from replicax.cli import plan as command
from replicax.cli.plan import PlanOptions
from replicax.plan.planned import Plan
from replicax.plan.target import ATTACHED
from replicax.recipes.gpt2 import GPT2

H100 = ("--target", "h100:8", "--by-formula")
LINE = ("linear_regression", "--points", 48)


def planned(main: Main, *arguments: object) -> tuple[str, dict[str, Any]]:
    """Return what the command prints and what it writes."""
    out = shown(main, *arguments, "--run", "mine")
    return out, json.loads(Path("runs/mine/plan.json").read_text())


def shown(main: Main, *arguments: object) -> str:
    out = done(main, "plan", *arguments)
    assert max(map(len, out.splitlines())) <= 80
    return out


@EXHAUSTIVE
@pytest.mark.parametrize("recipe", only(["linear_regression"], ["linear_regression", "lenet"]))
def test_a_recipe_is_compiled_for_its_target(recipe: str, main: Main) -> None:
    out = shown(main, recipe, "--target", "cpu:2", "--run", "mine", "--json-file", "p.json")
    written: dict[str, Any] = json.loads(Path("p.json").read_text())
    in_run = json.loads(Path("runs/mine/plan.json").read_text())
    assert {"written_by": "replicax", **in_run} == written
    assert written["fits"]
    assert written["asked"]["compiled"]
    assert written["about"]["recipe"] == recipe
    assert written["about"]["compiler"].startswith("jaxlib ")
    assert written["target"]["devices"] == 2
    assert recipe in out
    assert "see    runs/mine/ (plan.json)" in out


def test_no_batch_is_advised_that_is_larger_than_the_data(main: Main) -> None:
    out, written = planned(main, *LINE, *H100, "--batch-size", 16)
    assert written["largest"]["rows"] == 48 // 8
    assert [each["batch_size"] for each in written["batches"]] == [16, 48]
    assert "(48 in all) take" in " ".join(out.split())


def test_a_refused_target_names_those_that_are_known(main: Main) -> None:
    error = refusal(main, "plan", *LINE, "--target", "quantum:4")
    assert all(name in error for name in (ATTACHED, CPU.name, *CHIPS))
    near = refusal(main, "plan", *LINE, "--target", "gtx1070:4")
    assert "'gtx1070ti'" in near
    assert "a100-80" not in near


def given(main: Main, monkeypatch: pytest.MonkeyPatch, *arguments: object) -> dict[str, Any]:
    """Return the arguments that the command passes to `rx.plan`."""
    asked: dict[str, Any] = {}
    signature = inspect.signature(command.rx.plan)

    def plan(dp: Any, model: Any, batch: Any, **options: Any) -> Plan:
        signature.bind(dp, model, batch, **options)
        asked.update(options, dp=dp, model=model, batch=batch)
        return make_plan(options["target"])

    monkeypatch.setattr(command.rx, "plan", plan)
    shown(main, *arguments)
    return asked


def test_flags_reach_the_plan(main: Main, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = ("--layout", "zero1", "--accumulate", 2, "--precision", "bfloat16")
    asked = given(
        main, monkeypatch, *LINE, "--target", "v5e:2x4", *flags, "--tokens", 96, "--noise-scale", 7
    )
    dp = asked["dp"]
    assert (dp.mode.name, dp.layout.name, dp.accumulate) == ("jit", "zero1", 2)
    assert dp.precision.name == "bfloat16"
    assert asked["target"].text == "v5e:2x4"
    assert (asked["wished_rows"], asked["noise_scale"]) == (96, 7)  # it has no tokens: rows
    assert asked["changes"] is None
    assert not asked["by_formula"]
    assert asked["compile_alternatives"] is False


@pytest.mark.parametrize(("names", "wanted"), [((), True), (("a=1, b",), ["a=1", "b"])])
def test_changes_to_compile(
    names: tuple[str, ...], wanted: Any, main: Main, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = given(main, monkeypatch, *LINE, "--compile-alternatives", *names, "--target", "cpu:2")
    assert asked["compile_alternatives"] == wanted


def test_a_recipe_tells_its_tokens_its_size_and_its_own_remat(
    main: Main, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("text.txt").write_text("to be or not to be " * 400)
    sizes = ("--context", 16, "--width", 32, "--heads", 4, "--layers", 1, "--batch-size", 8)
    asked = given(
        main, monkeypatch, "gpt2", "--data", "text.txt", *sizes, *H100, "--tokens", 16 * 80
    )
    assert asked["tokens_per_row"] == 16
    assert asked["wished_rows"] == 80
    transformer = asked["transformer"]
    assert dataclasses.astuple(transformer) == (16, 4, 32 // 4)
    assert asked["changes"]
    assert all(change.startswith("remat=") for change in asked["changes"])
    assert f"remat={GPT2().remat}" not in asked["changes"]
    assert asked["by_formula"]


def test_the_noise_scale_of_a_run(main: Main, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Path] = []

    def load(path: Path) -> Any:
        asked.append(path)
        return SimpleNamespace(rows=123.0, resolved=True)

    monkeypatch.setattr(command, "load_noise_scale", load)
    _, written = planned(main, *LINE, *H100, "--noise-scale", "runs/measured")
    assert asked == [Path("runs/measured")]
    assert written["about"]["noise_scale"] == 123.0
    assert all(batch["steps"] > 1 for batch in written["batches"])


def test_a_noise_scale_that_no_run_has_resolved(
    main: Main, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Unresolved(SimpleNamespace):
        def __str__(self) -> str:
            return "measure longer"

    monkeypatch.setattr(command, "load_noise_scale", lambda path: Unresolved(resolved=False))
    assert "--noise-scale runs/a: measure longer" in refusal(
        main, "plan", *LINE, *H100, "--noise-scale", "runs/a"
    )


def test_mode_single_plans_one_device(main: Main) -> None:
    shown(main, *LINE, "--target", "h100:1", "--by-formula", "--mode", "single")


def test_help_tells_every_flag_in_words(main: Main) -> None:
    out = done(main, "plan", "--help")
    assert "plan RECIPE" in out
    out = done(main, "plan", "linear_regression", "--help")
    for name in get_type_hints(PlanOptions):
        assert f"--{name.replace('_', '-')}" in out
    assert_mentions(out, "v5e:16x16", "noise scale", "compiler")
