"""`replicax recipes`: list the built-in recipes."""

from replicax.cli.output import show
from replicax.errors import ConfigError, ReplicaxError
from replicax.recipes.recipe import BUILT_IN, find_recipe


def recipes(arguments: list[str]) -> int:
    """Run the command; return its exit code."""
    if arguments and arguments[0] not in ("-h", "--help"):
        raise ConfigError(f"recipes takes no arguments, but got {arguments[0]!r}; leave it out")
    for name in BUILT_IN:
        try:
            text = (find_recipe(name).__doc__ or "").splitlines()[0]
        except ReplicaxError as error:
            text = f"not available: {error}"
        show(f"{name:<18} {text}")
    show(f"{'file.py:Name':<18} your own; replicax train RECIPE --help lists a recipe's flags")
    return 0
