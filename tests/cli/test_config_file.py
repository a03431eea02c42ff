"""`replicax train RECIPE --config FILE.toml`: flags from a file."""

import datetime
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.command_line import RECIPE, Main, done, refusal

import replicax as rx
from replicax.cli.config_file import field_names, read_toml
from replicax.cli.flags import parse_with_recipe
from replicax.cli.train import TrainOptions
from replicax.recipes.mlp import MLP

ROOT = Path(__file__).parents[2]
IMPORTS = """
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar
"""
FIELDS = """
    root: Path | None = None
    sizes: tuple[int, ...] = (1, 2)
    presets: ClassVar = {"small": {"points": 32, "sizes": (7,)}}
"""
NEEDED = """

@dataclass(frozen=True, kw_only=True)
class Needed(Mine):
    width: int
"""

KEYS = ["recipe", "preset", *field_names(MLP), *field_names(TrainOptions)]
VALUES = st.recursive(
    st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.dates() | st.times(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab-"), inner, max_size=2),
    max_leaves=4,
)


def toml(value: Any) -> str:
    """Return a value as TOML."""
    if isinstance(value, dict):
        inner = ", ".join(f"{json.dumps(key)} = {toml(each)}" for key, each in value.items())
        return f"{{{inner}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(toml, value))}]"
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    return json.dumps(value, ensure_ascii=False) if isinstance(value, bool | str) else repr(value)


FILES = st.binary() | st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=4).map(
    lambda table: "\n".join(f"{key} = {toml(value)}" for key, value in table.items()).encode()
)


@pytest.fixture
def recipe(folder: Path) -> str:
    (folder / "my_recipe.py").write_text(IMPORTS + RECIPE + FIELDS + NEEDED)
    return "my_recipe.py:Mine"


def test_the_keys_are_flags_and_flags_override_them(recipe: str, main: Main, folder: Path) -> None:
    (folder / "a.toml").write_text(
        'recipe = "my_recipe.py:Mine"\npoints = 16\nbatch-size = 8\nroot = "a/b"\n'
        'steps = 2\nsave_minutes = 0\ndevices = 2\nlayout = "zero1"\nrun = "mine"\n'
    )
    done(main, "train", recipe, "--config", "a.toml", "--batch-size", "4", "--seed", "5")
    config = json.loads((folder / "runs/mine/config.json").read_text())
    fields, options = config["fields"], config["options"]
    assert (fields["points"], fields["batch_size"], fields["root"]) == (16, 4, "a/b")
    assert (options["steps"], options["save_minutes"], options["seed"]) == (2, 0, 5)
    assert (options["devices"], options["layout"]) == (2, "zero1")


@pytest.mark.parametrize(
    ("text", "points", "sizes"),
    [
        ('preset = "small"', 32, (7,)),
        ('preset = "small"\nsizes = [3, 4]', 32, (3, 4)),
        ("points = 5", 5, (1, 2)),
    ],
)
def test_a_preset_comes_before_the_other_keys(
    text: str, points: int, sizes: tuple[int, ...], recipe: str, folder: Path
) -> None:
    (folder / "a.toml").write_text(text)
    parsed = parse_with_recipe("train", TrainOptions, [recipe, "--config=a.toml"])
    assert (parsed.recipe.points, parsed.recipe.sizes) == (points, sizes)
    assert parsed.preset == ("small" if "preset" in text else None)


def test_what_the_file_lacks_a_flag_may_give(recipe: str, folder: Path) -> None:
    (folder / "a.toml").write_text("points = 5")
    given = ["my_recipe.py:Needed", "--config", "a.toml", "--width", "3"]
    assert parse_with_recipe("train", TrainOptions, given).recipe.width == 3


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("learning-rat = 0.1", ["'learning_rat'", "'learning_rate'", "--help"]),
        ("log_evry = 2", ["'log_evry'", "'log_every'"]),
        ("points = 'many'", ["points='many'", "int"]),
        ("steps = '5'", ["steps='5' is not int"]),
        ("devices = 2.5", ["devices=2.5"]),
        ("batch_size = 0", ["batch-size"]),
        ("recipe = 'mlp'", ["mlp", "my_recipe.py:Mine"]),
        ("\ufeffpreset = 'smal'", ["'smal'", "'small'"]),
        ("points = oops", ["TOML", "line 1"]),
    ],
)
def test_what_is_wrong_is_one_line(
    text: str, words: list[str], recipe: str, main: Main, folder: Path
) -> None:
    (folder / "a.toml").write_text(text)
    line = refusal(main, "train", recipe, "--config", "a.toml")
    assert [word for word in words if word not in line] == []
    missing = refusal(main, "train", recipe, "--config", "none.toml")
    assert "none.toml" in missing
    assert "TOML" not in missing


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(FILES | st.integers(1, 2000).map(lambda deep: b"sizes = " + b"[" * deep))
def test_any_file_is_read_or_is_one_line(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "a.toml"
    path.write_bytes(text)
    said = ""
    try:
        read_toml(path, "mlp", MLP, TrainOptions)
    except rx.errors.ConfigError as error:
        said = str(error)
    assert "\n" not in said


def test_the_example_is_read() -> None:
    example: Any = ROOT / "examples/lenet.toml"
    given = ["lenet", "--config", str(example), "--epochs", "1"]
    parsed = parse_with_recipe("train", TrainOptions, given)
    assert (parsed.recipe.epochs, parsed.recipe.batch_size) == (1, 256)
    assert (parsed.options.compute.devices, parsed.options.record.log_to) == (2, "csv,tensorboard")
