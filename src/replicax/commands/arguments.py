"""The arguments of a command that takes a recipe."""

import dataclasses
from typing import Any, Generic, TypeVar

from replicax.errors import ConfigError
from replicax.flags import parse_flags
from replicax.recipes.recipe import find_recipe, recipe_name

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
    options, recipe, preset = parse_flags(find_recipe(spec), options_class, flags, program)
    return Arguments(spec, preset, recipe, options)


def words(text: str) -> list[str]:
    """Return the words of a flag that takes several, separated by commas."""
    return [word.strip() for word in text.split(",") if word.strip()]
