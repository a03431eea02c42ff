"""`replicax sample`: continue a text with a run's model."""

import dataclasses
from typing import Annotated, Any

from replicax.cli.flags import BY_PLACE, parse, shown_as
from replicax.cli.opened import RunOptions
from replicax.core.data.sources import as_source
from replicax.core.ground.job import Alone
from replicax.errors import ConfigError
from replicax.recipes.recipe import recipe_name
from replicax.text.arguments import Natural, NotNegative, Seed
from replicax.train.folder.load import Loaded


@dataclasses.dataclass(frozen=True, kw_only=True)
class SampleOptions(RunOptions):
    """Continues a text with the model of a gpt2 run, and prints both."""

    text: Annotated[str, BY_PLACE, shown_as("TEXT")]
    """The text to continue."""
    tokens: Natural = 50
    """Tokens to continue it by, at most."""
    temperature: NotNegative = 0.8
    """Below 1 for likelier tokens, 0 for the likeliest."""
    seed: Seed = 0
    """Seed of the draws."""

    own = "in Python, rx.load_model(run_dir, model) returns it, to draw from as you do"


def sample(arguments: list[str]) -> int:
    """Run the command; return its exit code."""
    options = parse("sample", SampleOptions, arguments)
    loaded = options.open("sample")
    recipe = loaded.recipe
    if not hasattr(recipe, "continued"):
        raise ConfigError(
            f"recipe {recipe_name(type(recipe))} cannot continue text; sample takes a gpt2 run, or "
            "one of a recipe with a method continued"
        )
    _check_tokenizer(loaded)
    model = loaded.dp.model(loaded.state, copy=False)
    print(
        recipe.continued(
            model,
            options.text,
            tokens=options.tokens,
            temperature=options.temperature,
            seed=options.seed,
        )
    )
    return 0


def _check_tokenizer(loaded: Loaded) -> None:
    """Raise `ConfigError` if a tokenizer trained on the run's text has changed."""
    recipe: Any = loaded.recipe
    if getattr(recipe, "tokenizer", None) != "bpe":
        return
    source = as_source(recipe.train_source(), recipe.batch_size, Alone(), shuffle=False, seed=0)
    then, now = loaded.config.get("data", {}), source.fingerprint()
    if any(then.get(name) != now[name] for name in ("rows", "leaves")):
        raise ConfigError(
            f"the text has changed since the run ({then.get('rows')} rows then, {now['rows']} "
            "now), and with it the bpe tokenizer trained on it; restore the text, or train "
            "with --tokenizer my/tokenizer.json"
        )
