"""What a recipe is, and finding one by its name or path."""

import dataclasses
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any, Protocol

import jax
import optax

from replicax.errors import ConfigError, did_you_mean

BUILT_IN: Mapping[str, str] = MappingProxyType(
    {
        "cnn": "replicax.recipes.cnn:CNN",
        "lenet": "replicax.recipes.lenet:LeNet",
        "linear_regression": "replicax.recipes.linear_regression:LinearRegression",
    }
)


class Recipe(Protocol):
    """A frozen dataclass: its fields are the hyperparameters, and the flags of the CLI.

    It may have a method `data_description() -> str`, which says what data was found.
    """

    batch_size: int
    """Rows of a global batch."""
    epochs: int
    """Passes over the training data."""

    def model(self, key: jax.Array) -> Any:
        """A new model: anything that `DataParallel.init` takes."""

    def loss(self, model: Any, batch: Any, key: jax.Array | None) -> Any:
        """See `DataParallel`; `key` is None in evaluation."""

    def optimizer(self) -> optax.GradientTransformation:
        """An optax gradient transformation."""

    def train_source(self) -> Any:
        """Anything that `DataParallel.feed` takes."""

    def eval_source(self) -> Any:
        """The same, or None for no evaluation."""


_MEMBERS = ("model", "loss", "optimizer", "train_source", "eval_source")
_FIELDS = ("batch_size", "epochs")


def find_recipe(spec: str) -> type[Any]:
    """The recipe class that `spec` means.

    Args:
        spec: a built-in name, `path/to/file.py:Name`, or `package.module:Name`.

    Raises:
        ConfigError: no such recipe, or it is not one.
    """
    spec = BUILT_IN.get(spec, spec)
    where, colon, name = spec.partition(":")
    if not colon and not where.endswith(".py"):
        raise ConfigError(
            f"no recipe is named {spec!r}; there are {', '.join(BUILT_IN)}, or your own as "
            f"file.py:Name{did_you_mean(spec, BUILT_IN)}"
        )
    module = _load_file(Path(where)) if where.endswith(".py") else _load_module(where)
    classes = {key: value for key, value in vars(module).items() if _is_own_class(value, module)}
    if not name:
        recipes = [key for key, value in classes.items() if not _missing(value)]
        if len(recipes) != 1:
            raise ConfigError(
                f"{where} has {len(recipes)} recipes ({', '.join(recipes) or 'none'}); name one: "
                f"{where}:Name"
            )
        name = recipes[0]
    if name not in classes:
        raise ConfigError(
            f"{where} has no class {name!r}; it has {', '.join(classes) or 'none'}"
            f"{did_you_mean(name, classes)}"
        )
    if missing := _missing(classes[name]):
        raise ConfigError(
            f"{name} in {where} lacks {', '.join(missing)}; a recipe is a dataclass with the "
            f"fields {', '.join(_FIELDS)} and the methods {', '.join(_MEMBERS)}: add them"
        )
    recipe: type[Any] = classes[name]
    return recipe


def recipe_name(recipe: type[Any]) -> str:
    """The name a recipe's class is known by: the built-in one, or the class's."""
    path = f"{recipe.__module__}:{recipe.__name__}"
    return next((name for name, spec in BUILT_IN.items() if spec == path), recipe.__name__)


def _missing(recipe: type[Any]) -> list[str]:
    fields = (
        {field.name for field in dataclasses.fields(recipe)} if _is_dataclass(recipe) else set()
    )
    return [name for name in _FIELDS if name not in fields] + [
        name for name in _MEMBERS if not hasattr(recipe, name)
    ]


def _is_dataclass(value: Any) -> bool:
    return isinstance(value, type) and dataclasses.is_dataclass(value)


def _is_own_class(value: Any, module: ModuleType) -> bool:
    return inspect.isclass(value) and value.__module__ == module.__name__


def _load_module(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        raise ConfigError(
            f"no module {name!r}; a recipe is package.module:Name, file.py:Name, or one of "
            f"{', '.join(BUILT_IN)}"
        ) from error


def _load_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise ConfigError(f"{path} is no file; give the path of a recipe as file.py:Name")
    spec = importlib.util.spec_from_file_location(path.stem, path.resolve())
    if spec is None or spec.loader is None:
        raise ConfigError(f"{path} cannot be loaded as Python; rename it to end in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # dataclasses look their module up
    sys.path.insert(0, str(path.resolve().parent))  # the file's neighbours, as python file.py has
    spec.loader.exec_module(module)
    return module
