"""The flags of a command -> its options, and the recipe that it takes."""

import contextlib
import dataclasses
import inspect
import io
import re
import types
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import (
    Annotated,
    Any,
    Generic,
    Literal,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from replicax.errors import ConfigError, did_you_mean, require
from replicax.recipes.recipe import BUILT_IN, find_recipe, presets_of, recipe_name
from replicax.train.changes import read_config

Options = TypeVar("Options")

tyro = require("tyro", "cli")
BY_PLACE: Any = tyro.conf.Positional
"""The annotation of what is given by its place, without a flag; `shown_as` names it."""
_UNPREFIXED = tyro.conf.arg(name="")


def one_of(table: Iterable[str]) -> Any:
    """Return the annotation of a flag that takes a name of `table`, which may still get others."""
    return tyro.conf.arg(
        constructor_factory=lambda: tyro.extras.literal_type_from_choices(list(table)),
        help_behavior_hint=lambda default: f"(default: {default[2:-2]})",  # tyro has it as ['jit']
    )


def several_of(table: Iterable[str], default: str) -> Any:
    """Return the annotation of names of `table`, separated by commas; help calls None `default`."""
    return tyro.conf.arg(
        metavar="NAMES",
        help_behavior_hint=lambda _: f"(any of {', '.join(table)}; default: {default})",
    )


def shown_as(value: str, default: str | None = None) -> Any:
    """Return the annotation of a flag: what help calls its value, and its default of None."""
    hint = "" if default is None else f"(default: {default})"
    return tyro.conf.arg(metavar=value, help_behavior_hint=hint)


def words(text: str) -> list[str]:
    """Return the words of a flag that takes several, separated by commas."""
    return [word.strip() for word in text.split(",") if word.strip()]


@dataclasses.dataclass(frozen=True)
class Arguments(Generic[Options]):
    """A recipe, and what to do with it."""

    spec: str
    """The recipe as it was named."""
    preset: str | None
    """The preset that it starts from."""
    recipe: Any
    options: Options

    @property
    def name(self) -> str:
        """Name of the recipe."""
        return recipe_name(type(self.recipe))

    def about(self) -> dict[str, Any]:
        """The recipe's name and preset, as results record them."""
        return {"recipe": self.spec, "preset": self.preset}


def parse(command: str, options_class: type[Options], arguments: Sequence[str]) -> Options:
    """The options of a command that takes no recipe; the docstring of their class is the help."""
    description, names = inspect.getdoc(options_class), _names(options_class)
    parsed: Options = _parsed(options_class, arguments, f"replicax {command}", description, names)
    return parsed


def parse_with_recipe(
    command: str, options_class: type[Options], arguments: Sequence[str]
) -> Arguments[Options]:
    """The recipe that comes first, whose fields are flags too, and the options.

    Where the options have a field `config`, other flags go on top of what that file says.
    """
    if arguments and arguments[0] in ("-h", "--help"):
        print(f"usage: replicax {command} RECIPE [FLAGS]\n")
        print(f"replicax recipes lists the recipes; replicax {command} RECIPE --help the flags.")
        raise SystemExit(0)
    if not arguments or arguments[0].startswith("-"):
        raise ConfigError(f"{command} needs a recipe before its flags; replicax recipes lists them")
    spec, *flags = arguments
    program, recipe_class = f"replicax {command} {spec}", find_recipe(spec)
    presets, names = presets_of(recipe_class), [*_names(options_class), *_names(recipe_class)]
    names += ["preset"] if presets else []
    if twice := [name for name in names if names.count(name) > 1]:
        raise ConfigError(
            f"{recipe_class.__name__} has a field {min(twice)!r}, which is a flag of every recipe; "
            "rename the field"
        )
    begun, flags = _beginning(spec, recipe_class, options_class, flags, program)
    parsed = _parsed(
        _flags_class(recipe_class, options_class, begun),
        flags,
        program,
        recipe_class.__doc__,
        names,
    )
    given = {
        name: value
        for title in _groups(options_class)
        for name, value in vars(getattr(parsed, title)).items()
    }
    return dataclasses.replace(begun, recipe=parsed.recipe, options=options_class(**given))


def _flags_class(
    recipe_class: type[Any], options_class: type[Any], begun: Arguments[Any]
) -> type[Any]:
    """A dataclass of the fields of a recipe and of options, with what is `begun` for defaults."""
    fields: list[Any] = []
    if presets := presets_of(recipe_class):
        about = "Values to start from; the other flags go on top."
        choice = tyro.conf.arg(metavar=f"{{{','.join(presets)}}}", help=about)
        fields.append(("preset", Annotated[str | None, choice], begun.preset))
    fields.append(("recipe", Annotated[recipe_class, _UNPREFIXED], _default(begun.recipe)))
    for title, group in _groups(options_class).items():
        unprefixed = _UNPREFIXED if group is options_class else tyro.conf.OmitArgPrefixes
        options = begun.options and {name: vars(begun.options)[name] for name in _names(group)}
        as_group: Any = Annotated[group, unprefixed, tyro.conf.arg(help="")]
        fields.append((title, as_group, _default(options and group(**options))))
    return dataclasses.make_dataclass("Flags", fields, kw_only=True)


def _groups(options_class: type[Any]) -> dict[str, type[Any]]:
    """Title -> the classes that `options_class` is made of, where it has no fields of its own.

    Help has a box for each.
    """
    if inspect.get_annotations(options_class):
        return {"options": options_class}
    return {each.__name__.removesuffix("Options").lower(): each for each in options_class.__bases__}


def _names(each: type[Any]) -> list[str]:
    return [field.name for field in dataclasses.fields(each)]


def _default(value: Any) -> Any:
    """The field of a dataclass that has `value` as its default, or none where it is None."""
    if value is None:
        return dataclasses.field()
    return dataclasses.field(default_factory=lambda: value)


def _parsed(
    fields_class: type[Any],
    flags: Sequence[str],
    program: str,
    description: str | None,
    names: Sequence[str],
) -> Any:
    """An instance of `fields_class`; `names` are the fields that a wrong flag may have meant."""
    if "json" in names:
        flags = _json_alone(flags)
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
        if not stop.code:
            raise
        box = "\n".join(said.getvalue().splitlines()[1:])  # of which its first part is the error
        text = re.sub("[│─╭╮╰╯]", " ", re.split(r"─{20,} *│|Got errors:", box)[0])
        line = " ".join(text.split()).rstrip(".")
        raise ConfigError(f"{line}; {program} --help lists the flags") from None
    if unknown:
        known = [f"--{name.replace('_', '-')}" for name in names]
        raise ConfigError(
            f"unknown flag {unknown[0]!r}{did_you_mean(unknown[0], known)}; {program} --help lists "
            "the flags"
        )
    return parsed


def _json_alone(flags: Sequence[str]) -> list[str]:
    """The same where `--json` has a value: without one it prints."""
    following = [*flags[1:], "--"]
    return [
        "--json=-" if flag == "--json" and after.startswith("--") else flag
        for flag, after in zip(flags, following, strict=False)
    ]


def _beginning(
    spec: str, recipe_class: type[Any], options_class: type[Any], flags: list[str], program: str
) -> tuple[Arguments[Any], list[str]]:
    """Return what --preset or --config set in place of the defaults, and the other flags.

    The recipe and the options are None where they say nothing.
    """
    presets, path, preset = presets_of(recipe_class), None, None
    if presets or "preset" not in _names(recipe_class):
        preset, flags = taken("--preset", flags)
    if "config" in _names(options_class):
        path, flags = taken("--config", flags)
    if path is not None:
        if preset is not None:
            raise ConfigError(
                "--preset and --config both say what fields to start from; leave one of them out"
            )
        return _of_config(Path(path), spec, recipe_class, options_class), flags
    if preset is None:
        return Arguments(spec, None, None, None), flags
    if not presets:
        raise ConfigError(
            f"unknown flag '--preset': {recipe_class.__name__} has no presets; {program} --help "
            "lists the flags"
        )
    if preset not in presets:
        said = f"no preset {preset!r}" if preset else "--preset comes without the name of a preset"
        raise ConfigError(
            f"{said}; those of {recipe_class.__name__} are {', '.join(presets)}"
            f"{did_you_mean(preset, presets)}"
        )
    unset = {
        field.name: tyro.MISSING  # for a flag to fill
        for field in dataclasses.fields(recipe_class)
        if field.init
        and field.default is dataclasses.MISSING
        and field.default_factory is dataclasses.MISSING
    }
    return Arguments(spec, preset, recipe_class(**{**unset, **presets[preset]}), None), flags


def taken(flag: str, flags: list[str]) -> tuple[str | None, list[str]]:
    """The value of `flag`, which others follow from, "" where it has none; and the other flags.

    Raises:
        ConfigError: it is given more than once.
    """
    places = [place for place, each in enumerate(flags) if each.partition("=")[0] == flag]
    if not places:
        return None, flags
    if len(places) > 1:
        raise ConfigError(
            f"{flag} is given {len(places)} times; one is taken: leave the others out"
        )
    (place,), rest = places, list(flags)
    _, equals, value = rest.pop(place).partition("=")
    if not equals and rest[place:] and not rest[place].startswith("-"):
        value = rest.pop(place)
    return value, rest


def _of_config(
    path: Path, spec: str, recipe_class: type[Any], options_class: type[Options]
) -> Arguments[Options]:
    """The recipe, its preset and the options in the `config.json` at `path`."""
    config = read_config(path)
    of = config.get("recipe")
    if of is None or BUILT_IN.get(of, of) != BUILT_IN.get(spec, spec):
        raise ConfigError(
            f"{path} is of {f'the recipe {of}' if of else 'no recipe'} and this is {spec}; the "
            "fields of one are not those of another: name the file of a run of this recipe"
        )
    options = {name: value for name, value in config["options"].items() if name != "run"}
    made = _made(recipe_class, config["fields"], path), _made(options_class, options, path)
    return Arguments(spec, config.get("preset"), *made)


def _made(kind: type[Any], values: Mapping[str, Any], path: Path) -> Any:
    """The dataclass `kind` with `values`, as JSON has them."""
    fields, hints = (
        {each.name: each.init for each in dataclasses.fields(kind)},
        get_type_hints(kind),
    )
    if unknown := [name for name in values if name not in fields]:
        raise ConfigError(
            f"{path} has {unknown[0]}, which {kind.__name__} has not: take it out of a copy"
        )
    given = {name: value for name, value in values.items() if fields[name]}
    return kind(**{name: _typed(given[name], hints[name], path, name) for name in given})


def _typed(value: Any, hint: Any, path: Path, name: str) -> Any:
    """A JSON `value` as what `hint` says: paths and tuples are strings and lists there."""
    union = get_origin(hint) in (Union, types.UnionType)
    kinds = get_args(hint) if union else (hint,)
    if isinstance(value, dict):
        inner = [kind for kind in kinds if dataclasses.is_dataclass(kind)]
        return _made(inner[0], value, path) if inner else value  # type: ignore[arg-type]
    if isinstance(value, list):
        several = next((kind for kind in kinds if get_origin(kind) in (tuple, list)), list[Any])
        items = [_typed(each, get_args(several)[0], path, name) for each in value]
        return tuple(items) if get_origin(several) is tuple else items
    if not isinstance(value, str) or str in kinds or Any in kinds:
        return value
    if any(get_origin(kind) is Literal for kind in kinds):
        return value
    if Path not in kinds:
        flag = f"--{name.replace('_', '-')}"
        raise ConfigError(f"{path} has {name} as the text {value!r}: take it out, and give {flag}")
    return Path(value)
