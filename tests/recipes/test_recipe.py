"""Finding a recipe by name, file or module, and the errors when it is missing."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.figures import refused

from replicax.errors import ConfigError
from replicax.recipes.recipe import BUILT_IN, find_recipe, presets_of, recipe_name

MINE = """
import dataclasses
from replicax.recipes.linear_regression import LinearRegression

@dataclasses.dataclass(frozen=True)
class Mine(LinearRegression):
    extra: int = 3
"""
PLAIN = """
class Plain:
    batch_size = 8
    epochs = 1
    def model(self, key): ...
    def loss(self, model, batch, key): ...
    def optimizer(self): ...
    def train_source(self): ...
    def eval_source(self): ...
"""
HALF = """
import dataclasses

@dataclasses.dataclass
class Half:
    batch_size: int = 8
    def model(self, key): ...
    def loss(self, model, batch, key): ...
    def train_source(self): ...
"""

Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Write]:
    """Writes a file into the working directory; modules it loads are removed at the end."""
    modules, paths = dict(sys.modules), list(sys.path)
    monkeypatch.chdir(tmp_path)

    def write(text: str, name: str = "my_recipe.py") -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    yield write
    sys.path[:] = paths
    for name in set(sys.modules) - set(modules):
        if name.startswith(("my_", "my.")):
            del sys.modules[name]
    for name, module in modules.items():
        sys.modules[name] = module


def test_a_file_with_one_recipe_needs_no_name(write: Write) -> None:
    write(MINE + PLAIN)
    assert find_recipe("my_recipe.py").__name__ == "Mine"


def test_a_module_and_a_name_is_a_recipe(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    write("from my_package.inner import Mine", "my_package/__init__.py")
    path = write(MINE, "my_package/inner.py")
    monkeypatch.syspath_prepend(str(path.parent.parent))
    for spec in ("my_package.inner:Mine", "my_package:Mine"):
        assert recipe_name(find_recipe(spec)) == "Mine"


def test_two_files_of_one_name_are_two_recipes(write: Write) -> None:
    for folder, extra in (("a", 1), ("b", 2)):
        write(MINE.replace("= 3", f"= {extra}"), f"{folder}/my_recipe.py")
    first, second = (find_recipe(f"{folder}/my_recipe.py:Mine") for folder in "ab")
    assert (first().extra, second().extra) == (1, 2)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("linear_regresion", ["'linear_regresion'", "cnn", "mean 'linear_regression'"]),
        ("zzz", ["'zzz'", "cnn, gpt2, lenet, linear_regression, mlp", "file.py:Name"]),
        ("", ["cnn, gpt2, lenet, linear_regression, mlp"]),
        ("no_such.py:Mine", ["no_such.py is", "file"]),
        ("no_such_module:Mine", ["no module 'no_such_module'"]),
        ("my_recipe.inner:Mine", ["no module 'my_recipe.inner'"]),
        (":Mine", ["file.py:Name"]),
        (".my_recipe:Mine", [".my_recipe"]),
        ("my_recipe.py:Mime", ["no class 'Mime'", "mean 'Mine'"]),
        ("my_recipe.py:", ["my_recipe.py has 2 recipes", "Mine, Other", "name one"]),
        ("my_empty.py", ["my_empty.py has 0 recipes", "none"]),
        ("my_empty.py:Mine", ["no class 'Mine'", "none"]),
        ("my_plain.py:Plain", ["Plain", "not a dataclass", "@dataclasses.dataclass(frozen=True)"]),
        ("my_half.py:Half", ["Half", "lacks epochs, optimizer, eval_source", "dataclass"]),
        ("my_half.py", ["0 recipes"]),
        (".", ["'.'"]),
    ],
)
def test_what_is_no_recipe_is_refused_with_what_is_missing(
    spec: str, words: list[str], write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(MINE + "class Other(Mine): ...\n")
    write("", "my_empty.py")
    write(PLAIN, "my_plain.py")
    write(HALF, "my_half.py")
    monkeypatch.syspath_prepend(str(path.parent))
    with refused(ConfigError, *words):
        find_recipe(spec)


def test_an_import_that_fails_inside_a_recipe_is_its_own_error(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write("import no_such_dependency\n", "my_broken.py")
    monkeypatch.syspath_prepend(str(path.parent))
    for spec in ("my_broken:Mine", "my_broken.py:Mine"):
        with pytest.raises(ModuleNotFoundError, match="no_such_dependency"):
            find_recipe(spec)


PRESETS = """
    presets: ClassVar = {"big": {"points": 9, "extra": 5}, "none": {}}
"""


@pytest.mark.parametrize("name", BUILT_IN)
def test_every_built_in_preset_makes_a_recipe(name: str) -> None:
    recipe = find_recipe(name)
    assert recipe_name(recipe) == name
    for values in presets_of(recipe).values():
        made = recipe(**values)
        assert {field: getattr(made, field) for field in values} == values


@pytest.mark.parametrize(
    ("presets", "words"),
    [
        (PRESETS.replace("points", "pints"), ["'big'", "'pints'", "Mine", "mean 'points'"]),
        (PRESETS.replace("extra", "presets"), ["'big'", "'presets'", "batch_size, epochs"]),
        ('    presets: ClassVar = ["big"]', ["Mine", "ClassVar[Mapping"]),
        ('    presets: ClassVar = {"big": 3}', ["Mine", "ClassVar[Mapping"]),
        ("    presets: int = 3", ["Mine", "ClassVar[Mapping", "rename"]),
    ],
)
def test_presets_that_fit_no_recipe_are_refused(
    presets: str, words: list[str], write: Write
) -> None:
    write("from typing import ClassVar\n" + MINE + presets)
    with refused(ConfigError, *words):
        find_recipe("my_recipe.py:Mine")
