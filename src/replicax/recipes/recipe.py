"""The recipe protocol, lookup by name or path, and reconstruction from JSON."""

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

from replicax.core.ground.leaves import PyTree
from replicax.core.models.definition import Definition
from replicax.core.models.split import split_model
from replicax.errors import ConfigError, did_you_mean
from replicax.text.python_file import load_file
from replicax.weights.rename_table import Rename

BUILT_IN: Mapping[str, str] = {
    "cnn": "replicax.recipes.cnn:CNN",
    "gpt2": "replicax.recipes.gpt2:GPT2",
    "lenet": "replicax.recipes.lenet:LeNet",
    "linear_regression": "replicax.recipes.linear_regression:LinearRegression",
    "mlp": "replicax.recipes.mlp:MLP",
}

Prediction = tuple[Callable[[Any, jax.Array], Any], jax.ShapeDtypeStruct]
"""A function `(model, rows)` of inputs `[rows, ...]`, and the shape and dtype of one of them."""


class Recipe(Protocol):
    """A frozen dataclass whose fields are the hyperparameters and the CLI flags.

    Optional members:

    - `data_description() -> str`: a description of the data;
    - `after_training(model) -> str | None`: text to show after training;
    - `eval_data(path) -> source`: like `eval_source`, for the data at `path`;
    - `continued(model, text, *, tokens, temperature, seed) -> str`: `text` with a continuation;
    - `prediction() -> Prediction`: for `replicax export RUN FILE.stablehlo`;
    - `weight_names() -> Mapping`: the names that other programs have for the parameters, as
      `rename=` of `rx.load_weights`; for `--init-from` and `replicax export`;
    - `rules() -> Rules`: how parameters are split over the mesh axes `model` and `stage`, for
      `--model-parallel` and `--stages`; see `rx.layout`;
    - `tokens_per_row: int`: the number of tokens in a row;
    - `schedule() -> optax.Schedule`: the optimizer's learning rate, for records, defined in the
      class that defines `optimizer`;
    - `presets: ClassVar[Mapping[str, Mapping[str, Any]]]`: names for `--preset`, each with field
      values.
    """

    batch_size: int
    """Rows per global batch."""
    epochs: int
    """Passes over the training data."""

    def model(self, key: jax.Array) -> Any:
        """Create a model: anything that `DataParallel.init` accepts."""

    def loss(self, model: Any, batch: Any, key: jax.Array | None) -> Any:
        """Compute the loss, as for `DataParallel`; `key` is None in evaluation."""

    def optimizer(self) -> optax.GradientTransformation:
        """Return an optax gradient transformation."""

    def train_source(self) -> Any:
        """Return the training data: anything that `DataParallel.feed` accepts."""

    def eval_source(self) -> Any:
        """Return the evaluation data, or None for no evaluation."""


_MEMBERS = ("model", "loss", "optimizer", "train_source", "eval_source")
_FIELDS = ("batch_size", "epochs")


def find_recipe(spec: str) -> type[Any]:
    """Find the recipe class of a built-in name, `file.py:Name` or `package.module:Name`.

    Raises:
        ConfigError: there is no such class, or it is not a recipe.
    """
    spec = BUILT_IN.get(spec, spec)
    where, colon, name = spec.partition(":")
    if where.endswith(".py"):
        module = load_file(Path(where), "a recipe as file.py:Name")
    elif colon:
        module = _load_module(where)
    else:
        raise ConfigError(
            f"no recipe is named {spec!r}; use {', '.join(BUILT_IN)}, or your own as "
            f"file.py:Name{did_you_mean(spec, BUILT_IN)}"
        )
    classes = {key: value for key, value in vars(module).items() if inspect.isclass(value)}
    defined = [key for key, value in classes.items() if value.__module__ == module.__name__]
    if not name:
        recipes = [key for key in defined if dataclasses.is_dataclass(classes[key])]
        recipes = [key for key in recipes if not _missing(classes[key])]
        if len(recipes) != 1:
            raise ConfigError(
                f"{where} has {len(recipes)} recipes ({', '.join(recipes) or 'none'}); name one: "
                f"{where}:Name"
            )
        (name,) = recipes
    if name not in classes:
        raise ConfigError(
            f"{where} has no class {name!r}; it has {', '.join(defined) or 'none'}"
            f"{did_you_mean(name, defined)}"
        )
    recipe: type[Any] = classes[name]
    if not dataclasses.is_dataclass(recipe):
        raise ConfigError(
            f"{name} in {where} is not a dataclass; a recipe is a dataclass whose fields are its "
            "hyperparameters: add @dataclasses.dataclass(frozen=True)"
        )
    if missing := _missing(recipe):
        raise ConfigError(
            f"{name} in {where} lacks {', '.join(missing)}; a recipe is a dataclass with the "
            f"fields {', '.join(_FIELDS)} and the methods {', '.join(_MEMBERS)}: add them"
        )
    _check_presets(recipe, where)
    return recipe


def recipe_name(recipe: type[Any]) -> str:
    """Return the built-in name of a recipe class, or the class's own name."""
    path = f"{recipe.__module__}:{recipe.__name__}"
    return next((name for name, spec in BUILT_IN.items() if spec == path), recipe.__name__)


def presets_of(recipe: type[Any]) -> Mapping[str, Mapping[str, Any]]:
    """Return the recipe's presets, which map names to field values; empty if it has none."""
    presets: Mapping[str, Mapping[str, Any]] = getattr(recipe, "presets", {})
    return presets


def weight_names(recipe: Any) -> Rename:
    """Return the recipe's names of weights; without any, they are named by their paths."""
    names: Rename = recipe.weight_names() if hasattr(recipe, "weight_names") else {}
    return names


def _check_presets(recipe: type[Any], where: str) -> None:
    fields = {field.name: field for field in dataclasses.fields(recipe)}
    presets = presets_of(recipe)
    maps = (presets, *(presets.values() if isinstance(presets, Mapping) else ()))
    if "presets" in fields or not all(isinstance(each, Mapping) for each in maps):
        raise ConfigError(
            f"presets of {recipe.__name__} in {where} must map names to field values; "
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
    """Return `make(*arguments)` with shapes for arrays, or with arrays if it cannot be traced."""
    definitions: list[Definition] = []

    def parts() -> tuple[PyTree, PyTree]:
        definition, params, extras = split_model(make(*arguments))
        definitions.append(definition)
        return params, extras

    try:
        params, extras = jax.eval_shape(parts)
    except jax.errors.JAXTypeError:  # it depends on values
        return make(*arguments)
    return definitions[0].merge(params, extras)


def recipe_of(recipe_class: type[Any], fields: Mapping[str, Any]) -> Any:
    """Return the recipe with these field values; fields added since get their defaults.

    Raises:
        ConfigError: a value cannot be restored from its JSON, or its field no longer exists.
    """
    name = recipe_name(recipe_class)
    known = [field.name for field in dataclasses.fields(recipe_class)]
    if unknown := [field for field in fields if field not in known]:
        raise ConfigError(
            f"the run's recipe {name} had a field {unknown[0]!r}, which no longer exists; restore "
            "its code, or pass dp= and state= to rx.load"
        )
    try:
        return from_json(recipe_class, fields)
    except ConfigError:
        raise
    except (TypeError, ValueError, NameError) as error:
        raise ConfigError(
            f"the run's recipe {name} cannot be restored from its config.json ({error}); pass dp= "
            "and state= to rx.load"
        ) from error


def from_json(dataclass: type[Any], values: Mapping[str, Any]) -> Any:
    """Return the dataclass with the fields that `values` contains; raises ValueError."""
    return dataclass(**typed_fields(dataclass, values))


def typed_fields(dataclass: type[Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of the JSON `values` that are fields, of their types; raises ValueError."""
    hints = get_type_hints(dataclass)
    given = [field.name for field in dataclasses.fields(dataclass) if field.init]
    return {name: _typed(name, hints[name], values[name]) for name in given if name in values}


def _typed(name: str, hint: Any, value: Any) -> Any:
    """Convert the JSON `value` back to type `hint`; raises ValueError."""
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
    raise ValueError(f"{name}={value!r} is not {_name_of(hint)}")


def _name_of(hint: Any) -> str:
    """Return a type as a person says it: `int` of `int | None`, `'a' or 'b'` of a literal."""
    if get_origin(hint) is Literal:
        return " or ".join(map(repr, get_args(hint)))
    if get_origin(hint) in (Union, types.UnionType):
        kinds = [each for each in get_args(hint) if each is not types.NoneType]
        return " or ".join(map(_name_of, kinds))
    return str(getattr(hint, "__name__", hint))
