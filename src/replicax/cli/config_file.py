"""The values that a command starts from: those of a preset, of a run, or of a TOML file."""

import dataclasses
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypedDict, TypeVar, get_type_hints

from replicax.errors import ConfigError, did_you_mean, require
from replicax.recipes.recipe import BUILT_IN, from_json, presets_of, typed_fields
from replicax.train.folder.changes import read_config

Options = TypeVar("Options")


class _Saved(TypedDict, total=False):
    """The parts of a configuration that say what was trained, and how."""

    recipe: str | None
    preset: str | None
    fields: dict[str, Any]
    options: dict[str, Any]


def read_run(
    path: Path, spec: str, recipe_class: type[Any], options_class: type[Options]
) -> tuple[str | None, Any, Options]:
    """Return the preset, the recipe and the options in the `config.json` of a run.

    Raises:
        ConfigError: the file is none, is of another recipe, or has names or values that are wrong.
    """
    config = read_config(path, _Saved, edited=True)
    _check_recipe(path, config.get("recipe"), spec)
    fields, options = config.get("fields", {}), dict(config.get("options", {}))
    options.pop("run", None)
    for kind, values in ((recipe_class, fields), (options_class, options)):
        if unknown := [name for name in values if name not in field_names(kind)]:
            raise ConfigError(
                f"{path} has {unknown[0]}, unknown to {kind.__name__}: remove it from a copy"
            )
    try:
        recipe, parsed = from_json(recipe_class, fields), _groups(options_class, options)
    except ValueError as error:
        raise ConfigError(f"{path}: {error}; remove it from a copy, and set its flag") from error
    return config.get("preset"), recipe, parsed


def read_toml(
    path: Path, spec: str, recipe_class: type[Any], options_class: type[Options]
) -> tuple[str | None, Any, Options]:
    """Return the preset, the recipe and the options in a TOML file, whose keys are flags.

    A key is a flag without its dashes, `learning-rate` or `learning_rate`; `recipe` and `preset`
    are keys too. What the file does not have is left at its default, or to a flag.

    Raises:
        ConfigError: no TOML, another recipe, or a key or a value that is wrong.
    """
    try:
        read = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not a TOML file ({error}): correct it") from error
    given = {name.replace("-", "_"): value for name, value in read.items()}
    if "recipe" in given:
        _check_recipe(path, str(given.pop("recipe")), spec)
    preset = str(given.pop("preset")) if "preset" in given else None
    values = {} if preset is None else preset_values(preset, recipe_class)
    of_recipe, general = field_names(recipe_class), field_names(options_class)
    if unknown := [name for name in given if name not in (*of_recipe, *general)]:
        known = [*of_recipe, *general, "recipe", "preset"]
        raise ConfigError(
            f"{path} has the key {unknown[0]!r}{did_you_mean(unknown[0], known)}; its keys are "
            f"those flags that replicax train {spec} --help lists: correct it"
        )
    try:
        values |= typed_fields(recipe_class, given)
        return preset, started_from(recipe_class, values), _groups(options_class, given)
    except ValueError as error:
        raise ConfigError(f"{path}: {error}: correct it") from error


def preset_values(preset: str, recipe_class: type[Any]) -> dict[str, Any]:
    """Return the values of a recipe's preset, or raise `ConfigError`."""
    presets = presets_of(recipe_class)
    if not presets:
        raise ConfigError(f"unknown flag '--preset': {recipe_class.__name__} has no presets")
    if preset not in presets:
        said = f"unknown preset {preset!r}" if preset else "--preset without the name of a preset"
        raise ConfigError(
            f"{said}; those of {recipe_class.__name__} are {', '.join(presets)}"
            f"{did_you_mean(preset, presets)}"
        )
    return dict(presets[preset])


def started_from(recipe_class: type[Any], values: Mapping[str, Any]) -> Any:
    """Return the recipe with these values; required fields without one are left to flags."""
    missing = require("tyro", "cli").MISSING
    unset = {
        field.name: missing
        for field in dataclasses.fields(recipe_class)
        if field.init and field.default is field.default_factory is dataclasses.MISSING
    }
    return recipe_class(**{**unset, **values})


def field_names(kind: type[Any]) -> list[str]:
    """Return the field names of a dataclass; a group is replaced by the names of its fields."""
    names, hints = list[str](), get_type_hints(kind)
    for field in dataclasses.fields(kind):
        group = dataclasses.is_dataclass(hints[field.name])
        names += field_names(hints[field.name]) if group else [field.name]
    return names


def _check_recipe(path: Path, of: str | None, spec: str) -> None:
    if of is None or BUILT_IN.get(of, of) != BUILT_IN.get(spec, spec):
        raise ConfigError(
            f"{path} is for {f'the recipe {of}' if of else 'no recipe'}, not for {spec}; recipes "
            "have different fields: give the file of a run of this recipe"
        )


def _groups(options_class: type[Options], values: Mapping[str, Any]) -> Options:
    """Return the options, each group of them with those of the values that are its own."""
    hints = get_type_hints(options_class)
    return options_class(**{title: from_json(group, values) for title, group in hints.items()})
