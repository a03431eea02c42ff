"""`replicax evaluate`: loss and metrics of a run's model."""

import dataclasses
import math
from pathlib import Path
from typing import Annotated, Any

from replicax.cli.flags import parse, shown_as
from replicax.cli.opened import RunOptions, about_line
from replicax.cli.output import JsonOptions
from replicax.cli.step_options import data_lines
from replicax.errors import ConfigError
from replicax.recipes.recipe import recipe_name
from replicax.train.hooks.record_lines import metrics_text

ANOTHER_ROUNDING = 1e-2
"""Relative difference of a metric that other devices may cause, at most (in bfloat16)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluateOptions(JsonOptions, RunOptions):
    """Evaluates the model of a run that replicax train made.

    On the recipe's evaluation data, or on yours. The figures that the run itself recorded at this
    step, if any, are shown next to them. Nothing in the run's folder is changed.
    """

    data: Annotated[Path | None, shown_as("PATH", "the recipe's")] = None
    """Other data to evaluate on: a text for gpt2, the folder of the images for lenet and cnn."""

    own = (
        "in Python, dp.evaluate(rx.load(run_dir, dp=dp, state=dp.abstract_state(model)).state, "
        "source) evaluates it"
    )


def evaluate(arguments: list[str]) -> int:
    """Run the command; return its exit code."""
    options = parse("evaluate", EvaluateOptions, arguments)
    with options.working():
        loaded = options.open("evaluate")
        options.say(about_line(loaded.path.parent.parent, loaded.step, loaded.recipe))
        source = _source(loaded.recipe, options)
        metrics = loaded.dp.evaluate(loaded.state, loaded.dp.feed(source, loaded.recipe.batch_size))
    rows = int(metrics.pop("rows"))
    evaluations = (record for record in reversed(loaded.records) if record.kind == "eval")
    recorded = next((record.metrics for record in evaluations if record.step == loaded.step), None)
    if options.data is not None:
        recorded = None
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
    options.say(f"eval   {metrics_text(metrics)} · {rows:,} rows")
    if recorded is not None:
        same = metrics.keys() == recorded.keys() and all(
            math.isclose(value, recorded[name], rel_tol=ANOTHER_ROUNDING, abs_tol=1e-6)
            for name, value in metrics.items()
        )
        differs = " · differs: the data or the recipe's code has changed since the run"
        options.say(f"record {metrics_text(recorded)}{'' if same else differs}")
    return 0


def _source(recipe: Any, options: EvaluateOptions) -> Any:
    name = recipe_name(type(recipe))
    if options.data is not None:
        if not hasattr(recipe, "eval_data"):
            raise ConfigError(
                f"--data with recipe {name}, which cannot read data from a path; leave --data out, "
                "or give the recipe a method eval_data(path)"
            )
        options.say(f"data   {options.data}")
        return recipe.eval_data(options.data)
    source = recipe.eval_source()
    if source is None:
        raise ConfigError(f"recipe {name} has no evaluation data; give some with --data")
    options.say(*data_lines(recipe))
    return source
