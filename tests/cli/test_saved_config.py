"""`replicax train RECIPE --config FILE` repeats a run's configuration."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from support.command_line import RECIPE, Main, done, refusal

FIELDS = """
    root: Path | None = None
    other: Path = Path("there")
    sizes: tuple[int, ...] = (1, 2)
    files: tuple[Path, ...] = ()
    kind: Literal["a", "b"] = "a"
    rate: float | None = None
    presets: ClassVar = {"small": {"points": 32}}
"""
IMPORTS = "from pathlib import Path\nfrom typing import ClassVar, Literal\n"
FLAGS = (
    *("--points", "16", "--root", "a/b", "--sizes", "3", "4", "5", "--files", "x", "--kind", "b"),
    *("--steps", "2", "--devices", "2", "--layout", "zero1", "--seed", "5", "--max-bad-steps", "3"),
)


@pytest.fixture
def recipe(folder: Path) -> str:
    (folder / "my_recipe.py").write_text(IMPORTS + RECIPE + FIELDS)
    return "my_recipe.py:Mine"


def config_of(folder: Path, run: str) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / f"runs/{run}/config.json").read_text())
    assert config["options"].pop("run") == run
    del config["start"], config["checksum"]
    return config


def test_a_configuration_that_is_given_back_is_the_same(
    recipe: str, main: Main, folder: Path
) -> None:
    assert main("train", recipe, "--preset", "small", *FLAGS, "--run", "a")[0] == 0
    out = done(main, "train", recipe, "--config", "runs/a/config.json", "--run", "b")
    assert "resume" not in out
    wanted = config_of(folder, "a")
    assert config_of(folder, "b") == wanted
    assert (wanted["preset"], wanted["fields"]["sizes"]) == ("small", [3, 4, 5])
    again = ["--config=runs/b/config.json", "--seed", "6", "--sizes", "7", "--run", "c"]
    assert main("train", recipe, *again)[0] == 0
    changed = config_of(folder, "c")
    assert (changed["options"]["seed"], changed["fields"]["sizes"]) == (6, [7])
    assert changed["fields"] == {**wanted["fields"], "sizes": [7]}
    assert {**changed["options"], "seed": 5} == wanted["options"]
    assert changed["program"] == wanted["program"]


def test_a_configuration_from_before_an_option_has_its_default(
    recipe: str, main: Main, folder: Path
) -> None:
    assert main("train", recipe, *FLAGS, "--run", "a")[0] == 0
    path = folder / "runs/a/config.json"
    older = json.loads(path.read_text())
    for name in ("model_parallel", "stages", "fsdp_size", "schedule"):
        del older["options"][name]
    (folder / "older.json").write_text(json.dumps(older))
    assert main("train", recipe, "--config", "older.json", "--run", "b")[0] == 0
    assert config_of(folder, "b")["options"] == config_of(folder, "a")["options"]


def test_a_run_goes_on_with_another_split(main: Main, folder: Path) -> None:
    sizes = ("--layers", "3", "--hidden", "16", "--rows", "128", "--devices", "4", "--run", "a")
    assert main("train", "mlp", *sizes, "--epochs", "1")[0] == 0
    split = ("--model-parallel", "2", "--layout", "fsdp", "--fsdp-size", "2")
    out = done(main, "train", "mlp", *sizes, "--epochs", "2", *split)
    assert "change options.model_parallel 1 -> 2\n" in out
    assert re.search(r"^split  each layer\b.*\b2 devices · .* over 2 of 2 replicas$", out, re.M)
    assert re.search(r"done: 2 steps since .*\b2\b", out)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--config", "nowhere.json"], ["nowhere.json", "No such file"]),
        (["--config"], ["not a configuration"]),
        (["--config", "a.json", "--config=b.json"], ["--config", "2 times"]),
        (["--config", "other.json"], ["other.json", "recipe mlp", "my_recipe.py:Mine"]),
        (["--config", "script.json"], ["script.json", "no recipe"]),
        (["--config", "older.json"], ["older.json", "gone", "Mine"]),
        (["--config", "text.json"], ["text.json", "'many'", "points"]),
        (["--config", "good.json", "--preset", "small"], ["--preset", "--config"]),
    ],
)
def test_what_cannot_be_given_back_is_one_line(
    flags: list[str], words: list[str], recipe: str, main: Main, folder: Path
) -> None:
    good: dict[str, Any] = {"recipe": recipe, "preset": None, "fields": {}, "options": {}}
    for name, edits in {
        "good": {},
        "other": {"recipe": "mlp"},
        "script": {"recipe": None},
        "older": {"fields": {"gone": 1}},
        "text": {"fields": {"points": "many"}},
    }.items():
        (folder / f"{name}.json").write_text(json.dumps({**good, **edits}))
    line = refusal(main, "train", recipe, *flags)
    assert [word for word in words if word not in line] == []
