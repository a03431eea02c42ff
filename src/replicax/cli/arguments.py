"""The arguments of a command that takes a recipe."""

import dataclasses
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Generic, TypeVar

from replicax.cli.flags import CONFIG, parse_flags, take_flag
from replicax.errors import ConfigError
from replicax.recipes.recipe import BUILT_IN, find_recipe, recipe_name
from replicax.train.changes import read_config

Options = TypeVar("Options")


@dataclasses.dataclass(frozen=True)
class Arguments(Generic[Options]):
    """A recipe, and what to do with it."""

    spec: str
    """The recipe as it was named."""
    preset: str | None
    recipe: Any
    options: Options

    @property
    def name(self) -> str:
        """What the recipe is called."""
        return recipe_name(type(self.recipe))

    def to_config(self) -> dict[str, Any]:
        """The recipe for a `config.json`."""
        return {
            "recipe": self.spec,
            "preset": self.preset,
            "fields": dataclasses.asdict(self.recipe),
        }


def parse_arguments(
    command: str, options_class: type[Options], arguments: list[str]
) -> Arguments[Options] | None:
    """What follows `replicax COMMAND`; None where it asks for help, which is printed.

    Raises:
        ConfigError: no recipe, no such recipe, or a wrong flag.
    """
    if arguments and arguments[0] in ("-h", "--help"):
        print(f"usage: replicax {command} RECIPE [FLAGS]\n")
        print(f"replicax recipes lists the recipes; replicax {command} RECIPE --help the flags.")
        return None
    if not arguments or arguments[0].startswith("-"):
        raise ConfigError(f"{command} needs a recipe before its flags; replicax recipes lists them")
    spec, *flags = arguments
    program = f"replicax {command} {spec}"
    recipe_class, begun = find_recipe(spec), None
    if "config" in (field.name for field in dataclasses.fields(options_class)):  # type: ignore[arg-type]
        path, flags = take_flag(CONFIG, flags)
        begun = None if path is None else _begun(Path(path), spec, recipe_class, options_class)
    options, recipe, preset = parse_flags(recipe_class, options_class, flags, program, begun)
    return Arguments(spec, preset, recipe, options)


def _begun(
    path: Path, spec: str, recipe_class: type[Any], options_class: type[Options]
) -> tuple[Options, Any, str | None]:
    """The options, the recipe and the preset in the `config.json` at `path`."""
    config = read_config(path)
    of = config.get("recipe")
    if of is None or BUILT_IN.get(of, of) != BUILT_IN.get(spec, spec):
        raise ConfigError(
            f"{path} is of {f'the recipe {of}' if of else 'no recipe'} and this is {spec}; the "
            "fields of one are not those of another: name the file of a run of this recipe"
        )
    options = {name: value for name, value in config["options"].items() if name != "run"}
    made = _made(options_class, options, path), _made(recipe_class, config["fields"], path)
    return *made, config.get("preset")


def _made(kind: type[Any], values: Mapping[str, Any], path: Path) -> Any:
    """The dataclass `kind` with `values`, as JSON has them."""
    fields = {field.name: field.init for field in dataclasses.fields(kind)}
    if unknown := [name for name in values if name not in fields]:
        raise ConfigError(
            f"{path} has {unknown[0]}, which {kind.__name__} has not: take it out of a copy"
        )
    hints = typing.get_type_hints(kind)
    return kind(
        **{
            name: _typed(value, hints[name], path, name)
            for name, value in values.items()
            if fields[name]
        }
    )


def _typed(value: Any, hint: Any, path: Path, name: str) -> Any:
    """A JSON `value` as what `hint` says: paths and tuples are strings and lists there."""
    union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    kinds = typing.get_args(hint) if union else (hint,)
    if isinstance(value, dict):
        inner = [kind for kind in kinds if dataclasses.is_dataclass(kind)]
        return _made(inner[0], value, path) if inner else value  # type: ignore[arg-type]
    if isinstance(value, list):
        inner = [kind for kind in kinds if typing.get_origin(kind) in (tuple, list)]
        of, *_ = [*(typing.get_args(inner[0]) if inner else ()), Any]
        items = [_typed(each, of, path, name) for each in value]
        return tuple(items) if inner and typing.get_origin(inner[0]) is tuple else items
    taken = any(kind in (str, Any) or typing.get_origin(kind) is typing.Literal for kind in kinds)
    if not isinstance(value, str) or taken:
        return value
    if Path not in kinds:
        flag = f"--{name.replace('_', '-')}"
        raise ConfigError(f"{path} has {name} as the text {value!r}: take it out, and give {flag}")
    return Path(value)


def words(text: str) -> list[str]:
    """Return the words of a flag that takes several, separated by commas."""
    return [word.strip() for word in text.split(",") if word.strip()]
