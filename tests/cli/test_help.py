"""The help of the command line and of each command."""

import re

import pytest
from support.command_line import Main, done


def test_recipes_lists_each_with_what_it_is(main: Main) -> None:
    out = done(main, "recipes")
    lines = {line.split()[0]: line for line in out.splitlines()}
    assert set(lines) == {*("cnn", "gpt2", "lenet", "linear_regression", "mlp", "file.py:Name")}
    assert "fitted to" in lines["linear_regression"]
    assert "not available" not in out


def test_nothing_is_help_and_exit_code_2(main: Main) -> None:
    code, out, err = main()
    assert code == 2
    assert "usage: replicax" in out + err


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("--help", ["usage: replicax", "train RECIPE", "recipes", "--version"]),
        ("-h", ["usage: replicax", "train RECIPE", "recipes", "--version"]),
        ("train --help", ["usage: replicax train RECIPE"]),
        ("train -h", ["replicax recipes"]),
        ("recipes --help", ["linear_regression"]),
        (
            "evaluate --help",
            ["usage: replicax evaluate", "RUN", "--step N|best", "--data", "--json"],
        ),
        ("verify --help", ["--step FILE.py:name"]),
        ("verify linear_regression --help", ["--modes"]),
        ("verify --step --help", ["--micro-batches", "--weights", "--replicas", "--steps"]),
        ("doctor --help", ["--folders"]),
        ("export --help", ["--model"]),
        ("lint --help", ["--github"]),
        ("runs --help", ["FOLDER"]),
    ],
)
def test_every_command_has_help(command: str, words: list[str], main: Main) -> None:
    out = done(main, *command.split())
    assert [word for word in words if word not in out] == []
    assert [line for line in out.splitlines() if len(line) > 80] == []


FLAGS = """
accept-changes accumulate audit-every config delay devices dump-hlo early-stopping epochs
eval-at-start eval-every eval-every-epochs eval-rows every fragments fsdp-size gradient-norm help
init-from island-axis keep keep-best keep-every layout log-every log-format log-to max-bad-steps
measure-noise-scale micro-shards mode model-parallel on-divergence outer-momentum outer-rate
precision preset profile reduction run save-every save-minutes schedule seed send show-sharding
skip-spikes stages steps steps-per-call
"""
"""The flags of `replicax train` for any recipe. A change that adds one names, here or in the
changelog, the flag that it replaces or the user who asked."""


def test_train_has_no_flag_that_nobody_asked_for(main: Main) -> None:
    def flags(*arguments: str) -> set[str]:
        return set(re.findall(r"--([a-z][a-z-]+)", main(*arguments, "--help")[1]))

    of_recipe = set(re.findall(r"\w+", "batch_size hidden inputs layers learning_rate rows"))
    known = flags("train", "mlp") - {name.replace("_", "-") for name in of_recipe}
    assert {name for name in known if not name.startswith("no-")} == set(FLAGS.split())


def test_version(main: Main) -> None:
    out = done(main, "--version")
    assert re.fullmatch(r"replicax \d+\.\d+\.\d+\n", out)
