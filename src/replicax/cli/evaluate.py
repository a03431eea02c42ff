"""`replicax evaluate`: loss and metrics of a run's model."""

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from replicax.cli.flags import parse, shown_as
from replicax.cli.opened import RunOptions, about_line, metrics_text
from replicax.cli.output import JsonOptions
from replicax.cli.step_options import print_data
from replicax.errors import ConfigError
from replicax.recipes.recipe import recipe_name
from replicax.train.load import Loaded

ANOTHER_ROUNDING = 1e-2
"""Relative difference of a metric that other devices may make, in bfloat16 at most."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluateOptions(JsonOptions, RunOptions):
    """Evaluates the model of a run that replicax train made.

    On the recipe's evaluation data, or on yours. Beside the figures stand those that the run itself
    recorded at this step, where it did. Nothing in the run's folder is changed.
    """

    data: Annotated[Path | None, shown_as("PATH", "the recipe's")] = None
    """Other data to evaluate on, all of it: text for gpt2, the folder of the images for lenet and
    cnn."""


def evaluate(arguments: list[str]) -> int:
    """Run the command; return its exit code."""
    options = parse("evaluate", EvaluateOptions, arguments)
    with options.working():
        loaded = options.open("evaluate")
        if not options.shows_json:
            print(about_line(loaded), flush=True)
        source = _source(loaded.recipe, options)
        dp, rows_of_batch = loaded.dp, loaded.recipe.batch_size
        metrics = dp.evaluate(loaded.state, dp.feed(source, rows_of_batch))
    rows = int(metrics.pop("rows"))
    recorded = None if options.data is not None else _recorded(loaded)
    content = {
        "run": str(loaded.path.parent.parent),
        "recipe": recipe_name(type(loaded.recipe)),
        "step": loaded.step,
        "data": None if options.data is None else str(options.data),
        "rows": rows,
        "metrics": {name: x if math.isfinite(x) else None for name, x in metrics.items()},
        "recorded": recorded,
    }
    options.write_json(content)
    if not options.shows_json:
        print(f"eval   {metrics_text(metrics)} · {rows:,} rows")
        if recorded is not None:
            print(f"record {metrics_text(recorded)}{_verdict(metrics, recorded)}")
    return 0


def _source(recipe: Any, options: EvaluateOptions) -> Any:
    """Rows to evaluate on."""
    name = recipe_name(type(recipe))
    if options.data is not None:
        if not hasattr(recipe, "eval_data"):
            raise ConfigError(
                f"--data with recipe {name}, which reads no data from a path; leave --data out, or "
                "give the recipe a method eval_data(path)"
            )
        if not options.shows_json:
            print(f"data   {options.data}", flush=True)
        return recipe.eval_data(options.data)
    source = recipe.eval_source()
    if source is None:
        raise ConfigError(f"recipe {name} has no evaluation data; give some by --data")
    if not options.shows_json:
        print_data(recipe)
    return source


def _recorded(loaded: Loaded) -> dict[str, float] | None:
    """The metrics of the run's own evaluation at this step, if there was one."""
    records = (each for each in reversed(loaded.records) if each.kind == "eval")
    return next((each.metrics for each in records if each.step == loaded.step), None)


def _verdict(metrics: Mapping[str, float], recorded: Mapping[str, float]) -> str:
    same = metrics.keys() == recorded.keys() and all(
        math.isclose(value, recorded[name], rel_tol=ANOTHER_ROUNDING, abs_tol=1e-6)
        for name, value in metrics.items()
    )
    return "" if same else " · differs: the data, or the recipe's code, is not that of the run"
