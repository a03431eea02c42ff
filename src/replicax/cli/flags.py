"""The flags of one command -> its options and its recipe."""

import contextlib
import dataclasses
import inspect
import io
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, NoReturn, TypeVar

from replicax.errors import ConfigError, did_you_mean, require
from replicax.recipes.recipe import presets_of

Options = TypeVar("Options")

PRESET, CONFIG = "--preset", "--config"


def one_of(table: Iterable[str]) -> Any:
    """Return the annotation of a flag that takes a name of `table`, as it is when flags are parsed.

    Args:
        table: names, or a mapping from names, to which others may still be added.
    """
    tyro = require("tyro", "cli")
    return tyro.conf.arg(
        constructor_factory=lambda: tyro.extras.literal_type_from_choices(list(table)),
        help_behavior_hint=lambda default: f"(default: {default[2:-2]})",  # tyro has it as ['jit']
    )


def several_of(table: Iterable[str], default: str) -> Any:
    """Return the annotation of a flag that takes names of `table`, separated by commas, or None.

    Args:
        table: as for `one_of`; no name is refused here.
        default: what help calls None.
    """
    tyro = require("tyro", "cli")
    return tyro.conf.arg(
        metavar="NAMES",
        help_behavior_hint=lambda _: f"(any of {', '.join(table)}; default: {default})",
    )


def positional() -> Any:
    """Return the annotation of what is given by its place, without a flag; `shown_as` names it."""
    return require("tyro", "cli").conf.Positional


def shown_as(value: str, default: str | None = None) -> Any:
    """Return the annotation of a flag: what help calls its value, and its default of None."""
    tyro = require("tyro", "cli")
    hint = "" if default is None else f"(default: {default})"
    return tyro.conf.arg(metavar=value, help_behavior_hint=hint)


def parse_flags(
    recipe_class: type[Any],
    options_class: type[Options],
    flags: Sequence[str],
    program: str,
    begun: tuple[Options, Any, str | None] | None = None,
) -> tuple[Options, Any, str | None]:
    """The options, the recipe, and the name of the preset it starts from, or None.

    Args:
        recipe_class: from `find_recipe`; its fields are flags.
        options_class: a dataclass whose fields are flags with every recipe.
        flags: the arguments after the recipe.
        program: the command and the recipe, as help and errors call them.
        begun: what to begin with in place of the defaults.

    Raises:
        ConfigError: a wrong flag or preset, or a field of the recipe with an option's name.
        SystemExit: the flags ask for help, and it was printed.
    """
    tyro = require("tyro", "cli")
    presets = presets_of(recipe_class)
    preset, flags = _take_preset(recipe_class, flags, program)
    reserved = [*_field_names(options_class), *(["preset"] if presets else [])]
    if taken := set(_field_names(recipe_class)) & set(reserved):
        raise ConfigError(
            f"{recipe_class.__name__} has a field {min(taken)!r}, which is a flag of every recipe; "
            "rename the field"
        )
    unprefixed = tyro.conf.arg(name="")
    start, groups = dataclasses.field(), _groups(options_class)
    if begun is not None:
        if preset is not None:
            raise ConfigError(
                f"{PRESET} and {CONFIG} both say what fields to start from; leave one of them out"
            )
        _, recipe, preset = begun
        start = dataclasses.field(default_factory=lambda: recipe)
    elif preset is not None:
        filled = _from_preset(recipe_class, presets[preset], tyro.MISSING)
        start = dataclasses.field(default_factory=lambda: filled)
    fields: list[Any] = [("recipe", Annotated[recipe_class, unprefixed], start)]
    for title, group in groups.items():
        before = dataclasses.field()
        if begun is not None:
            before = dataclasses.field(default_factory=partial(_part, group, begun[0]))
        as_group = unprefixed if group is options_class else tyro.conf.OmitArgPrefixes
        fields.append((title, Annotated[group, as_group, tyro.conf.arg(help="")], before))
    if presets:
        choice = tyro.conf.arg(
            metavar=f"{{{','.join(presets)}}}",
            help="Values to start from; the other flags go on top.",
        )
        fields.insert(0, ("preset", Annotated[str | None, choice], preset))
    both = dataclasses.make_dataclass("Flags", fields, kw_only=True)
    names = [*reserved, *_field_names(recipe_class)]
    parsed = _parsed(both, flags, program, recipe_class.__doc__, names)
    given = {name: value for title in groups for name, value in vars(vars(parsed)[title]).items()}
    return options_class(**given), parsed.recipe, preset


def parse_options(options_class: type[Options], flags: Sequence[str], program: str) -> Options:
    """The options of a command that takes no recipe.

    Args:
        options_class: a dataclass whose fields are the flags, and whose docstring is the help.
        flags: the arguments of the command.
        program: the command, as help and errors call it.

    Raises:
        ConfigError: a wrong flag.
        SystemExit: the flags ask for help, and it was printed.
    """
    names = _field_names(options_class)
    parsed: Options = _parsed(options_class, flags, program, inspect.getdoc(options_class), names)
    return parsed


def _parsed(
    fields_class: type[Any],
    flags: Sequence[str],
    program: str,
    description: str | None,
    names: Sequence[str],
) -> Any:
    """What tyro makes of `flags`; `names` are the fields that a wrong flag may have meant."""
    tyro = require("tyro", "cli")
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            parsed, unknown = tyro.cli(
                fields_class,
                args=flags,
                prog=program,
                description=description,
                return_unknown_args=True,
            )
    except SystemExit as stop:
        if stop.code:
            _refuse_flags(said.getvalue(), program)
        raise
    if unknown:
        known = [f"--{name.replace('_', '-')}" for name in names]
        raise ConfigError(
            f"unknown flag {unknown[0]!r}{did_you_mean(unknown[0], known)}; {program} --help lists "
            "the flags"
        )
    return parsed


def take_flag(flag: str, flags: Sequence[str]) -> tuple[str | None, list[str]]:
    """The value of `flag`, which others follow from, "" where it has none; and the other flags.

    Raises:
        ConfigError: it is given more than once.
    """
    rest = list(flags)
    places = [place for place, each in enumerate(rest) if each.partition("=")[0] == flag]
    if not places:
        return None, rest
    if len(places) > 1:
        raise ConfigError(
            f"{flag} is given {len(places)} times; a run starts from one: leave the others out"
        )
    (place,) = places
    _, equals, value = rest.pop(place).partition("=")
    if not equals:
        value = rest.pop(place) if rest[place:] and not rest[place].startswith("-") else ""
    return value, rest


def _take_preset(
    recipe_class: type[Any], flags: Sequence[str], program: str
) -> tuple[str | None, list[str]]:
    """The preset that `flags` name, and the flags without it: tyro is given it as the defaults."""
    presets = presets_of(recipe_class)
    if not presets and "preset" in _field_names(recipe_class):
        return None, list(flags)
    name, rest = take_flag(PRESET, flags)
    if name is None:
        return None, rest
    if not presets:
        raise ConfigError(
            f"unknown flag {PRESET!r}: {recipe_class.__name__} has no presets; {program} --help "
            "lists the flags"
        )
    if name not in presets:
        said = f"no preset {name!r}" if name else f"{PRESET} comes without the name of a preset"
        raise ConfigError(
            f"{said}; those of {recipe_class.__name__} are {', '.join(presets)}"
            f"{did_you_mean(name, presets)}"
        )
    return name, rest


def _from_preset(recipe_class: type[Any], values: Mapping[str, Any], missing: Any) -> Any:
    """The preset's recipe; `missing` in fields that have no default, for a flag to fill."""
    unset = {
        field.name: missing
        for field in dataclasses.fields(recipe_class)
        if field.init
        and field.default is dataclasses.MISSING
        and field.default_factory is dataclasses.MISSING
    }
    return recipe_class(**{**unset, **values})


def _groups(options_class: type[Any]) -> dict[str, type[Any]]:
    """Title -> the classes that `options_class` is made of, where it has no fields of its own.

    Help has a box for each.
    """
    if inspect.get_annotations(options_class):
        return {"options": options_class}
    return {each.__name__.removesuffix("Options").lower(): each for each in options_class.__bases__}


def _part(group: type[Any], options: Any) -> Any:
    """The fields of `options` that are those of `group`, which it inherits from."""
    return group(**{name: getattr(options, name) for name in _field_names(group)})


def _field_names(each: type[Any]) -> list[str]:
    return [field.name for field in dataclasses.fields(each)]


def _refuse_flags(box: str, program: str) -> NoReturn:
    """Raise what tyro said in its box, as one line."""
    body = re.split(r"─{20,} *│|Got errors:", "\n".join(box.splitlines()[1:]))[0]
    text = " ".join(re.sub("[│─╭╮╰╯]", " ", body).split())
    raise ConfigError(f"{text.rstrip('.')}; {program} --help lists the flags")
