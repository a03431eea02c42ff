"""Parse the flags of a command into its options and its recipe."""

import contextlib
import dataclasses
import functools
import inspect
import io
import operator
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, Generic, get_args, get_type_hints

from replicax.cli.config_file import (
    Options,
    field_names,
    preset_values,
    read_run,
    read_toml,
    started_from,
)
from replicax.errors import ConfigError, did_you_mean, require
from replicax.recipes.recipe import find_recipe, presets_of, recipe_name
from replicax.text.arguments import Int32Count, check_ranges, fitted
from replicax.text.other_names import alike, is_of_others
from replicax.text.table import fold_lines

tyro = require("tyro", "cli")
BY_PLACE: Any = tyro.conf.Positional
"""The annotation of a positional argument; `shown_as` names it."""

OPTIONAL = tyro.constructors.ConstructorRegistry()


@OPTIONAL.primitive_rule  # type: ignore[untyped-decorator]
def _optional(info: Any) -> Any:
    """Parse `int | None` like `int`, so that help shows `INT` instead of `{None}|INT`."""
    kinds = [kind for kind in get_args(info.type) if kind is not type(None)]
    if len(kinds) == len(get_args(info.type)):
        return None
    make, lookup = tyro.constructors.PrimitiveTypeInfo.make, OPTIONAL.get_primitive_spec
    spec = lookup(make(functools.reduce(operator.or_, kinds), info.markers))
    if not isinstance(spec, tyro.constructors.PrimitiveConstructorSpec):
        return None
    return dataclasses.replace(
        spec,
        instance_from_str=lambda got: None if got == ["None"] else spec.instance_from_str(got),
        is_instance=lambda it: it is None or spec.is_instance(it),
        str_from_instance=lambda it: ["None"] if it is None else spec.str_from_instance(it),
    )


def one_of(table: Iterable[str]) -> Any:
    """Return the annotation of a flag whose value is a name in `table`, which may grow later."""
    return tyro.conf.arg(
        constructor_factory=lambda: tyro.extras.literal_type_from_choices(list(table)),
        help_behavior_hint=lambda default: f"(default: {default[2:-2]})",  # tyro passes ['jit']
    )


def several_of(table: Iterable[str], default: str) -> Any:
    """Return the annotation of comma-separated names in `table`; help shows None as `default`."""
    return tyro.conf.arg(
        metavar="NAMES",
        help_behavior_hint=lambda _: f"(any of {', '.join(table)}; default: {default})",
    )


def shown_as(value: str, default: str | None = None) -> Any:
    """Return the annotation of a flag: how help shows its value, and its default of None."""
    hint = "" if default is None else f"(default: {default})"
    return tyro.conf.arg(metavar=value, help_behavior_hint=hint)


ALL_OR_NAMES = tyro.constructors.PrimitiveConstructorSpec(
    nargs=(0, 1),
    metavar="[NAMES]",
    instance_from_str=lambda got: None if got == ["None"] else "".join(got),
    is_instance=lambda it: it is None or isinstance(it, str),
    str_from_instance=lambda it: ["None"] if it is None else [it],
)
"""The annotation of a flag with comma-separated names, or alone: then it is an empty string."""


def _one_path(got: list[str]) -> Path:
    if len(got) > 1:
        raise ConfigError(f"{' and '.join(got)} are given, and one is read: leave out the others")
    return Path(*got)


OPTIONAL_PATH = tyro.constructors.PrimitiveConstructorSpec(
    nargs=(0, 1),
    metavar="FOLDER",
    instance_from_str=_one_path,
    is_instance=lambda it: isinstance(it, Path),
    str_from_instance=lambda it: [str(it)],
)
"""The annotation of a folder that may be given by place, so that unknown flags are left over."""


def words(text: str) -> list[Any]:
    """Return the words of a comma-separated value, names that a function will check."""
    return [word.strip() for word in text.split(",") if word.strip()]


@dataclasses.dataclass(frozen=True)
class Arguments(Generic[Options]):
    """A recipe and the options of a command."""

    spec: str
    """The recipe as given on the command line."""
    preset: str | None
    """The preset on which the recipe is based."""
    recipe: Any
    options: Options

    @property
    def name(self) -> str:
        """Name of the recipe."""
        return recipe_name(type(self.recipe))

    def about(self) -> dict[str, Any]:
        """Return the recipe's name and preset, as recorded in results."""
        return {"recipe": self.spec, "preset": self.preset}


def parse(command: str, options_class: type[Options], arguments: Sequence[str]) -> Options:
    """Parse the options of a command without a recipe; their class's docstring is the help."""
    about = inspect.getdoc(options_class)
    parsed: Options = _parsed(options_class, arguments, f"replicax {command}", about)
    check_ranges(parsed, "--")
    return parsed


def parse_with_recipe(
    command: str, options_class: type[Options], arguments: Sequence[str]
) -> Arguments[Options]:
    """Parse the recipe, given first, whose fields are also flags, and the options.

    Options that are dataclasses themselves are groups, shown as separate boxes in help. If one has
    a field `config`, other flags override the values in that file.
    """
    if arguments and arguments[0] in ("-h", "--help"):
        print(f"usage: replicax {command} RECIPE [FLAGS]\n")
        more = f"replicax recipes lists the recipes; replicax {command} RECIPE --help the flags."
        print(fold_lines(more))
        raise SystemExit(0)
    if not arguments or arguments[0].startswith("-"):
        raise ConfigError(f"{command} needs a recipe before its flags; replicax recipes lists them")
    spec, *flags = arguments
    recipe_class = find_recipe(spec)
    presets, names = presets_of(recipe_class), field_names(options_class)
    of_recipe = [field.name for field in dataclasses.fields(recipe_class)]
    if twice := [name for name in of_recipe if name in [*names, *(["preset"] if presets else [])]]:
        raise ConfigError(
            f"{recipe_class.__name__} has a field {min(twice)!r}, which is a flag of every recipe; "
            "rename the field"
        )
    preset, path = None, None
    recipe = options = tyro.MISSING_NONPROP  # by default
    if "preset" not in of_recipe:
        preset, flags = flag_value("--preset", flags)
    if "config" in names:
        path, flags = flag_value("--config", flags)
    if preset is not None:
        if path is not None:
            raise ConfigError(
                "--preset and --config both set the initial fields; leave one of them out"
            )
        recipe = started_from(recipe_class, preset_values(preset, recipe_class))
    elif path is not None:
        read = read_toml if path.endswith(".toml") else read_run
        preset, recipe, options = read(Path(path), spec, recipe_class, options_class)
    fields: list[Any] = [
        ("recipe", Annotated[recipe_class, tyro.conf.arg(name="")]),
        (
            "options",
            Annotated[options_class, tyro.conf.arg(name="", help=""), tyro.conf.OmitArgPrefixes],
        ),
    ]
    begun = {"recipe": recipe, "options": options}
    if presets:
        about = "Initial values; other flags override them."
        choice = tyro.conf.arg(metavar=f"{{{','.join(presets)}}}", help=about)
        fields, begun["preset"] = [("preset", Annotated[str | None, choice]), *fields], preset
    both = dataclasses.make_dataclass("Flags", fields)
    program = f"replicax {command} {spec}"
    parsed = _parsed(both, flags, program, recipe_class.__doc__, both(**begun))
    for name in ("batch_size", "epochs"):
        fitted(f"--{name.replace('_', '-')}", Int32Count, getattr(parsed.recipe, name))
    check_ranges(parsed, "--")
    return Arguments(spec, preset, parsed.recipe, parsed.options)


def flag_value(flag: str, flags: list[str]) -> tuple[str | None, list[str]]:
    """Return the value of `flag` ("" if it has none), and the other flags.

    Raises:
        ConfigError: the flag is given more than once.
    """
    places = [place for place, each in enumerate(flags) if each.partition("=")[0] == flag]
    if not places:
        return None, flags
    if len(places) > 1:
        raise ConfigError(
            f"{flag} is given {len(places)} times; only one is allowed: leave the others out"
        )
    (place,), rest = places, list(flags)
    _, equals, value = rest.pop(place).partition("=")
    if not equals and rest[place:] and not rest[place].startswith("-"):
        value = rest.pop(place)
    return value, rest


class _Shown(io.StringIO):
    """Help that is about to be shown, in color if standard output is a terminal."""

    def __init__(self) -> None:
        super().__init__()
        self._target = sys.stdout

    def isatty(self) -> bool:
        return self._target.isatty()


def _parsed(
    kind: type[Any],
    flags: Sequence[str],
    program: str,
    description: str | None,
    default: Any = tyro.MISSING_NONPROP,
) -> Any:
    """Parse flags into the dataclass `kind`; tyro's errors are shortened to one line."""
    said, shown = io.StringIO(), _Shown()
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(shown):
            parsed, unknown = tyro.cli(
                kind,
                args=flags,
                prog=program,
                description=description,
                default=default,
                return_unknown_args=True,
                registry=OPTIONAL,
            )
    except SystemExit as stop:
        if not stop.code:
            print(fold_lines(shown.getvalue()), end="")
            raise
        box = re.sub(r"\x1b\[[\d;]*m|[│╭╮╰╯]", "", said.getvalue())
        _, _, untitled = box.partition("\n")
        first = next(filter(str.strip, re.split("[─-]{9,}|Got errors:", untitled)))
        line = " ".join(first.split()).rstrip(".")
        if wrong := re.search(r"choice '(.*)' for argument .* one of \((.*)\)", line):
            line += did_you_mean(wrong[1], re.findall("'(.*?)'", wrong[2]))
        raise ConfigError(f"{line}; {program} --help lists the flags") from None
    if unknown:
        if "--json" in flags and not unknown[0].startswith("--"):
            raise ConfigError(
                f"--json prints, so {unknown[0]!r} has no place; --json-file FILE writes a file"
            )
        by_place = [
            name
            for name, hint in get_type_hints(kind, include_extras=True).items()
            if BY_PLACE in getattr(hint, "__metadata__", ())
        ]
        meant = _meant(unknown[0], [name for name in field_names(kind) if name not in by_place])
        raise ConfigError(f"unknown flag {unknown[0]!r}{meant}; {program} --help lists the flags")
    return parsed


def _meant(flag: str, names: Sequence[str]) -> str:
    """Return the flag that was meant, by its name in other libraries or the closest one."""
    word = flag.lstrip("-").partition("=")[0].replace("-", "_")
    if same := alike(word, names):
        return f" (did you mean '--{same[0].replace('_', '-')}'?)"
    known = [f"--{name.replace('_', '-')}" for name in names]
    return "" if is_of_others(word) else did_you_mean(flag, known)
