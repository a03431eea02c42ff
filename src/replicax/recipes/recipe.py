"""The contract of a recipe; finding one by name or path; making one again from its JSON."""

import contextlib
import dataclasses
import enum
import importlib
import inspect
import types
from collections.abc import Callable, Mapping
from pathlib import Path, PurePath
from types import ModuleType
from typing import Any, Literal, Protocol, Union, get_args, get_origin, get_type_hints

import jax
import optax

from replicax.core.models.definition import Definition, PyTree
from replicax.core.models.split import split_model
from replicax.errors import ConfigError, did_you_mean
from replicax.python_file import load_file

BUILT_IN: Mapping[str, str] = {
    "cnn": "replicax.recipes.cnn:CNN",
    "gpt2": "replicax.recipes.gpt2:GPT2",
    "lenet": "replicax.recipes.lenet:LeNet",
    "linear_regression": "replicax.recipes.linear_regression:LinearRegression",
    "mlp": "replicax.recipes.mlp:MLP",
}


class Recipe(Protocol):
    """A frozen dataclass: its fields are the hyperparameters, and the flags of the CLI.

    It may have as well

    - `data_description() -> str`: what data was found;
    - `after_training(model) -> str | None`: what to show of the trained model;
    - `eval_data(path) -> source`: what `eval_source` gives, of the data at `path`;
    - `continued(model, text, *, tokens, temperature, seed) -> str`: `text`, continued;
    - `published_weights(model) -> dict[str, np.ndarray]`: the parameters under the names that other
      programs read;
    - `rules() -> Rules`: how its parameters are split over the mesh axes `model` and `stage`, for
      `--model-parallel` and `--stages`; see `rx.layout`;
    - `tokens_per_row: int`: what a row counts for where tokens are counted;
    - `schedule() -> optax.Schedule`: the learning rate of its optimizer, for records, in the class
      that has `optimizer`;
    - `presets: ClassVar[Mapping[str, Mapping[str, Any]]]`: names for `--preset`, each with values
      of fields.
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
    """The recipe class that is built in as `spec`, or is `file.py:Name` or `package.module:Name`.

    Raises:
        ConfigError: no such recipe, or it is not one.
    """
    spec = BUILT_IN.get(spec, spec)
    where, colon, name = spec.partition(":")
    if where.endswith(".py"):
        module = load_file(Path(where), "a recipe as file.py:Name")
    elif colon:
        module = _load_module(where)
    else:
        raise ConfigError(
            f"no recipe is named {spec!r}; there are {', '.join(BUILT_IN)}, or your own as "
            f"file.py:Name{did_you_mean(spec, BUILT_IN)}"
        )
    classes = {key: value for key, value in vars(module).items() if inspect.isclass(value)}
    own = [key for key, value in classes.items() if value.__module__ == module.__name__]
    if not name:
        recipes = [key for key in own if dataclasses.is_dataclass(classes[key])]
        recipes = [key for key in recipes if not _missing(classes[key])]
        if len(recipes) != 1:
            raise ConfigError(
                f"{where} has {len(recipes)} recipes ({', '.join(recipes) or 'none'}); name one: "
                f"{where}:Name"
            )
        (name,) = recipes
    if name not in classes:
        raise ConfigError(
            f"{where} has no class {name!r}; it has {', '.join(own) or 'none'}"
            f"{did_you_mean(name, own)}"
        )
    recipe: type[Any] = classes[name]
    if not dataclasses.is_dataclass(recipe):
        raise ConfigError(
            f"{name} in {where} is no dataclass; a recipe is one, with its hyperparameters for "
            "fields: put @dataclasses.dataclass(frozen=True) above it"
        )
    if missing := _missing(recipe):
        raise ConfigError(
            f"{name} in {where} lacks {', '.join(missing)}; a recipe is a dataclass with the "
            f"fields {', '.join(_FIELDS)} and the methods {', '.join(_MEMBERS)}: add them"
        )
    _check_presets(recipe, where)
    return recipe


def recipe_name(recipe: type[Any]) -> str:
    """The name a recipe's class is known by: the built-in one, or the class's."""
    path = f"{recipe.__module__}:{recipe.__name__}"
    return next((name for name, spec in BUILT_IN.items() if spec == path), recipe.__name__)


def presets_of(recipe: type[Any]) -> Mapping[str, Mapping[str, Any]]:
    """The recipe's presets: names, each with values of fields; empty where it has none."""
    presets: Mapping[str, Mapping[str, Any]] = getattr(recipe, "presets", {})
    return presets


def _check_presets(recipe: type[Any], where: str) -> None:
    fields = {field.name: field for field in dataclasses.fields(recipe)}
    presets = presets_of(recipe)
    maps = (presets, *(presets.values() if isinstance(presets, Mapping) else ()))
    if "presets" in fields or not all(isinstance(each, Mapping) for each in maps):
        raise ConfigError(
            f"presets of {recipe.__name__} in {where} is no mapping of names to values of fields; "
            "write presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {...}, or rename it"
        )
    settable = [name for name, field in fields.items() if field.init]
    for preset, values in presets.items():
        if unknown := [name for name in values if name not in settable]:
            raise ConfigError(
                f"the preset {preset!r} of {recipe.__name__} in {where} sets {unknown[0]!r}; its "
                f"fields are {', '.join(settable)}{did_you_mean(unknown[0], settable)}: rename it"
            )


def _missing(recipe: Any) -> list[str]:
    fields = {field.name for field in dataclasses.fields(recipe)}
    return [name for name in _FIELDS if name not in fields] + [
        name for name in _MEMBERS if not hasattr(recipe, name)
    ]


def _load_module(name: str) -> ModuleType:
    refusal = ConfigError(
        f"no module {name!r}; a recipe is package.module:Name, file.py:Name, or one of "
        f"{', '.join(BUILT_IN)}"
    )
    if not all(part.isidentifier() for part in name.split(".")):
        raise refusal
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        raise refusal from error


def abstract_model(make: Callable[..., Any], *arguments: Any) -> Any:
    """Return `make(*arguments)` with shapes for arrays; really made where it cannot be traced."""
    definitions: list[Definition] = []

    def parts() -> tuple[PyTree, PyTree]:
        definition, params, extras = split_model(make(*arguments))
        definitions.append(definition)
        return params, extras

    try:
        params, extras = jax.eval_shape(parts)
    except jax.errors.JAXTypeError:  # it looks at values
        return make(*arguments)
    return definitions[0].merge(params, extras)


def recipe_of(recipe_class: type[Any], fields: Mapping[str, Any]) -> Any:
    """The recipe with these fields; those that it did not have then are as by default.

    Raises:
        ConfigError: one cannot be made of its JSON, or is no field any more.
    """
    name = recipe_name(recipe_class)
    known = [field.name for field in dataclasses.fields(recipe_class)]
    if unknown := [field for field in fields if field not in known]:
        raise ConfigError(
            f"the run's recipe {name} had a field {unknown[0]!r}, and this one has none; go back "
            "to its code, or give rx.load dp= and state="
        )
    try:
        return from_json(recipe_class, fields)
    except ConfigError:
        raise
    except (TypeError, ValueError, NameError) as error:
        raise ConfigError(
            f"the run's recipe {name} cannot be made from its config.json ({error}); give rx.load "
            "dp= and state="
        ) from error


def from_json(dataclass: type[Any], values: Mapping[str, Any]) -> Any:
    """The dataclass with those of its fields that `values` has; raises ValueError."""
    hints = get_type_hints(dataclass)
    given = [field.name for field in dataclasses.fields(dataclass) if field.init]
    return dataclass(
        **{name: _typed(name, hints[name], values[name]) for name in given if name in values}
    )


def _typed(name: str, hint: Any, value: Any) -> Any:
    """The value of type `hint` that was written as `value`; raises ValueError."""
    kind, inner = get_origin(hint), get_args(hint)
    if hint is Any or (kind is Literal and value in inner):
        return value
    if kind in (Union, types.UnionType):
        for each in inner:
            with contextlib.suppress(ValueError):
                return _typed(name, each, value)
    elif kind is tuple and isinstance(value, list):
        inner = inner[:1] * len(value) if inner[1:] == (...,) else inner
        return tuple(_typed(name, *pair) for pair in zip(inner, value, strict=True))
    elif kind is list and isinstance(value, list):
        return [_typed(name, inner[0], each) for each in value]
    elif kind is dict and isinstance(value, dict) and inner[0] is str:
        return {key: _typed(name, inner[1], each) for key, each in value.items()}
    elif dataclasses.is_dataclass(hint) and isinstance(value, dict):
        return from_json(hint, value)  # type: ignore[arg-type]
    elif isinstance(hint, type):
        if issubclass(hint, PurePath) and isinstance(value, str):
            return hint(value)
        if issubclass(hint, enum.Enum):
            for member in hint:
                if value in (str(member), member.value):
                    return member
        numbers = (int, float) if hint is float else hint
        if isinstance(value, numbers) and (hint is bool or not isinstance(value, bool)):
            return value
    raise ValueError(f"{name}={value!r} is no {getattr(hint, '__name__', hint)}")
