"""`replicax plan`: predict a recipe's memory and speed on hardware you do not have."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Annotated, Any, get_args, get_type_hints

import jax

import replicax as rx
from replicax.cli.flags import ALL_OR_NAMES, parse_with_recipe, shown_as, words
from replicax.cli.output import JsonOptions, run_folder
from replicax.cli.plan_failures import plan_failures
from replicax.cli.step_options import ModeOptions, StepOptions, data_lines, make_host_devices
from replicax.core.modes.mode_table import as_mode
from replicax.errors import ConfigError
from replicax.plan.memory_formula import Transformer
from replicax.plan.plan_table import PLAN_PARTS, plan_lines
from replicax.plan.planned import Plan
from replicax.plan.target import ATTACHED, Target, parse_target
from replicax.recipes.recipe import abstract_model
from replicax.text.arguments import Count, Positive
from replicax.train.hooks.noise_scale import load_noise_scale

MOST_HOST_DEVICES = 4096
"""Limit on simulated devices that replace a target's, for kernels lowered only with devices."""
_REMAT = "remat"
"""The recipe field that selects what the backward pass recomputes."""


@dataclasses.dataclass(frozen=True)
class PlanOptions(JsonOptions, StepOptions, ModeOptions):
    """Options of `replicax plan` for any recipe."""

    target: Annotated[str, shown_as("TARGET", "the attached devices")] = ATTACHED
    """Hardware to plan for: h100:8, h100:64 (hosts of 8), v5e:16x16, v4:2x2x2, cpu:8."""
    tokens: Annotated[Positive | None, shown_as("FLOAT", "none")] = None
    """Tokens to train on (rows if the recipe has no tokens), to derive the device-hours from."""
    noise_scale: Annotated[str | None, shown_as("ROWS|FOLDER", "none")] = None
    """The gradient noise scale: rows, or the folder of a run with --measure-noise-scale."""
    islands: Annotated[Count | None, shown_as("N", "none")] = None
    """Islands, each with such a target, that compute the batch together (launch --islands)."""
    network: Annotated[str | None, shown_as("LINK", "none")] = None
    """The network between islands: "100 Mbit/s, 20 ms", or of each pair: "a-b=1Gbit,8ms; ..."."""
    by_formula: bool = False
    """Do not run the target's compiler."""
    compile_alternatives: Annotated[str | None, ALL_OR_NAMES] = None
    """Compile the changes too, all or those named (layout=fsdp,model=2), not the step alone."""
    run: Annotated[str | None, shown_as("NAME", "plan, recipe and time")] = None
    """Name of the folder in runs/."""


def plan(arguments: list[str]) -> int:
    """Run the command; return its exit code."""
    if arguments[:1] == ["--failures"]:  # of any job, without a recipe
        return plan_failures(arguments[1:])
    parsed = parse_with_recipe("plan", PlanOptions, arguments)
    options, recipe = parsed.options, parsed.recipe
    folder = run_folder(options.run, f"plan-{parsed.name}", new=True)
    options.fix_threads(options.mode)
    target, noise_scale = _target(options), _noise_scale(options.noise_scale)
    tokens_per_row, wished = getattr(recipe, "tokens_per_row", None), None
    if options.tokens is not None:
        wished = _above_0("--tokens", options.tokens) / (tokens_per_row or 1)

    about = {"name": " ".join(filter(None, (parsed.name, parsed.preset))), **parsed.about()}
    named_changes, printed = options.compile_alternatives, list[str]()

    def named(planned: Plan) -> Plan:
        return dataclasses.replace(planned, about={**about, **planned.about})

    def show_plan(planned: Plan) -> None:
        for part in PLAN_PARTS:
            if part not in (*planned.left, *printed):
                printed.append(part)
                options.say(*plan_lines(named(planned), part))

    with options.working() as show:
        mesh = options.mesh(options.least_devices)  # nothing is placed on it
        assert mesh is not None
        show("reading the data")
        options.say(*data_lines(recipe))
        dp = options.data_parallel(recipe, options.mode, mesh)
        planned = rx.plan(
            dp,
            abstract_model(recipe.model, jax.random.key(0)),
            recipe.train_source(),
            batch_size=recipe.batch_size,
            target=target,
            changes=_changes(recipe, dp) or None,
            rules=recipe.rules() if hasattr(recipe, "rules") else (),
            tokens_per_row=tokens_per_row,
            wished_rows=wished,
            noise_scale=noise_scale,
            transformer=_transformer(recipe),
            islands=options.islands,
            network=options.network,
            by_formula=options.by_formula,
            compile_alternatives=named_changes is not None and (words(named_changes) or True),
            show=show,
            show_plan=show_plan,
        )
    planned = named(planned)
    options.write_json(planned.to_json())
    if not options.json:
        folder.mkdir(parents=True)
        (folder / "plan.json").write_text(json.dumps(planned.to_json(), indent=2) + "\n")
        options.say(f"see    {folder}/ (plan.json)")
    return 0


def _target(options: PlanOptions) -> Target:
    """Return the planning target, without initializing accelerators unless they are the target."""
    if options.target.strip().lower() != ATTACHED:
        jax.config.update("jax_platforms", "cpu")
    target = parse_target(options.target)
    most = as_mode(options.mode).most_devices
    if most is not None and target.devices > most:
        raise ConfigError(
            f"--mode {options.mode} with --target {options.target}, which has {target.devices} "
            f"devices; the mode runs on at most {most}: leave it out"
        )
    if target.chip.platform == "cuda" and target.devices <= MOST_HOST_DEVICES:
        make_host_devices(max(target.devices, options.least_devices))
    elif options.least_devices > 1:
        make_host_devices(options.least_devices)
    return target


def _changes(recipe: Any, dp: rx.DataParallel) -> dict[str, rx.DataParallel]:
    """Return the recipe's step with other values of its field `remat`, if it has one."""
    return {
        f"{_REMAT}={value}": dp.replace(loss=dataclasses.replace(recipe, remat=value).loss)
        for value in get_args(get_type_hints(type(recipe)).get(_REMAT))
        if value != recipe.remat
    }


def _transformer(recipe: Any) -> Transformer | None:
    names = ("context", "heads", "width")
    if not all(isinstance(getattr(recipe, name, None), int) for name in names):
        return None
    return Transformer(recipe.context, recipe.heads, recipe.width // recipe.heads)


def _noise_scale(text: str | None) -> float | None:
    """Return the rows given by `--noise-scale`, or measured by the run that it names."""
    if text is None:
        return None
    try:
        rows = float(text)
    except ValueError:
        measured = load_noise_scale(Path(text))
        if not measured.resolved:
            raise ConfigError(f"--noise-scale {text}: {measured}") from None
        return measured.rows
    return _above_0("--noise-scale", rows)


def _above_0(flag: str, value: float) -> float:
    if not 0 < value < math.inf:
        raise ConfigError(f"{flag} {value:g}; it must be above 0: change it")
    return value
