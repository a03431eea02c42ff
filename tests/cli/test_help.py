"""The help of the command line and of each command."""

import re
from pathlib import Path

import pytest
from support.command_line import RECIPE, Main

from replicax import cli


def test_recipes_lists_each_with_what_it_is(main: Main) -> None:
    code, out, err = main("recipes")
    assert (code, err) == (0, "")
    lines = {line.split()[0]: line for line in out.splitlines()}
    assert set(lines) == {*("cnn", "gpt2", "lenet", "linear_regression", "mlp", "file.py:Name")}
    assert "fitted to" in lines["linear_regression"]
    assert "not available" not in out
    assert all(len(line) <= 100 for line in out.splitlines())


@pytest.mark.parametrize("arguments", [["--help"], ["-h"]])
def test_help_lists_the_commands(arguments: list[str], main: Main) -> None:
    code, out, err = main(*arguments)
    assert (code, err) == (0, "")
    for word in ("usage: replicax", "train RECIPE", "recipes", "--version"):
        assert word in out


def test_nothing_is_help_and_exit_code_2(main: Main) -> None:
    code, out, err = main()
    assert code == 2
    assert "usage: replicax" in out + err


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["train", "--help"], "usage: replicax train RECIPE"),
        (["train", "-h"], "replicax recipes"),
        (["recipes", "--help"], "linear_regression"),
    ],
)
def test_every_command_has_help(arguments: list[str], word: str, main: Main) -> None:
    code, out, err = main(*arguments)
    assert (code, err) == (0, "")
    assert word in out


def test_help_of_a_recipe_lists_its_flags_and_the_options(main: Main, folder: Path) -> None:
    (folder / "my_recipe.py").write_text(RECIPE)
    code, out, err = main("train", "my_recipe.py:Mine", "--help")
    assert (code, err) == (0, "")
    for word in ("A line of mine.", "--offset", "Added to nothing", "--batch-size", "--devices"):
        assert word in out


FLAGS = """
accept-changes accumulate audit-every config delay devices early-stopping epochs eval-at-start
eval-every eval-every-epochs eval-rows every fragments fsdp-size gradient-norm help init-from
island-axis keep keep-best keep-every layout log-every log-to max-bad-steps measure-noise-scale
micro-shards mode model-parallel on-divergence outer-momentum outer-rate precision preset profile
reduction run save-every save-minutes schedule seed send show-sharding skip-spikes stages steps
steps-per-call
