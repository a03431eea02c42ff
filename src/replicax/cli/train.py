"""`replicax train`: train, evaluate and record a recipe."""

import dataclasses
import os
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any, Literal

import jax

import replicax as rx
from replicax.cli import failed
from replicax.cli.flags import Arguments, parse_with_recipe, several_of, shown_as, words
from replicax.cli.initial_model import initial_model
from replicax.cli.output import run_folder, show
from replicax.cli.program_cache import keep_programs
from replicax.cli.sharding import print_sharding
from replicax.cli.step_options import (
    DeviceOptions,
    ModeOptions,
    RoundOptions,
    StepOptions,
    data_lines,
    first_rows,
    make_host_devices,
)
from replicax.cluster.failure import stop_all_now
from replicax.core.data.sources import ProcessLocal, can_shuffle
from replicax.core.ground.job import Job
from replicax.core.ground.train_state import TrainState
from replicax.errors import ConfigError, choose
from replicax.islands.island_place import find_island
from replicax.plan.largest import at_once_and_fitting
from replicax.plan.steps import in_fit
from replicax.plan.target import attached_target
from replicax.recipes.recipe import weight_names
from replicax.text.arguments import Count, NotNegative, Seed
from replicax.text.streams import json_lines, unfailing_stdout
from replicax.text.table import labelled
from replicax.text.wording import size_text
from replicax.train.hooks.figures import injected_rates
from replicax.train.run.host_memory import keep_freed_memory
from replicax.train.run.stopping import Interrupt, shown_signal
from replicax.train.run.summary import Fit

OF_THIS_START = ("accept_changes", "config", "log_format")
"""Options that do not belong to the run."""
NOISE_EVERY = 10
"""Steps between two samples of the gradient noise. Small batches need hundreds of samples."""

LOGGERS = {
    "comet": rx.hooks.Comet,
    "csv": rx.hooks.CSV,
    "mlflow": rx.hooks.MLflow,
    "tensorboard": rx.hooks.TensorBoard,
    "trackio": rx.hooks.Trackio,
    "wandb": rx.hooks.WandB,
}
"""The loggers that `--log-to` can name."""

# Each field's docstring is one line: tyro keeps line breaks in --help.


@dataclasses.dataclass(frozen=True)
class StartOptions:
    """Length and starting point of the run."""

    steps: Annotated[Count | None, shown_as("N", "the epochs")] = None
    """Updates, instead of epochs."""
    seed: Seed = 0
    """Seed of the initial model, the data order, and all other randomness."""
    run: Annotated[str | None, shown_as("NAME", "recipe and time")] = None
    """Name of the run and its folder in runs/; an existing run resumes from its checkpoint."""
    init_from: Annotated[Path | None, shown_as("FILE", "none")] = None
    """Weights to begin with: a file of safetensors or torch, or a folder of them."""
    config: Annotated[Path | None, shown_as("FILE", "none")] = None
    """Flags in a TOML file, or the config.json of a run, except its name; flags override it."""
    accept_changes: bool = False
    """Resume a run although its configuration has changed; each change is printed."""
    show_sharding: bool = False
    """Draw how the parameters and the batch are sharded, before training."""


@dataclasses.dataclass(frozen=True)
class ComputeOptions(StepOptions, ModeOptions, DeviceOptions):
    """How a step is computed."""

    steps_per_call: Annotated[Count | None, shown_as("N", "more than 1 for small steps")] = None
    """Steps of each dispatched program; checkpoints and stops come between two of them."""


@dataclasses.dataclass(frozen=True)
class IslandOptions(RoundOptions):
    """Rounds of steps between two exchanges of islands."""


@dataclasses.dataclass(frozen=True)
class EvalOptions:
    """When to evaluate the run, besides at its end, and how to act on the result."""

    eval_every: Annotated[Count | None, shown_as("N", "every epoch")] = None
    """Steps between two evaluations, instead of epochs."""
    eval_every_epochs: Annotated[Count | None, shown_as("N", "1, or none with --eval-every")] = None
    """Epochs between two evaluations."""
    eval_rows: Annotated[Count | None, shown_as("N", "all")] = None
    """Rows of an evaluation at most, rounded up to whole batches."""
    eval_at_start: bool = False
    """Also evaluate before the first step."""
    keep_best: Annotated[str | None, shown_as("METRIC[:min|max]", "none")] = None
    """Keep the checkpoint of the best evaluation; best.json names it."""
    early_stopping: Annotated[str | None, shown_as("METRIC[:N][:min|max]", "none")] = None
    """End the run once N evaluations in a row (3 by default) did not improve the metric."""

    def evaluation(self, source: Any) -> rx.Evaluation | None:
        """Return when to evaluate the run on `source`; None without a source."""
        if source is None:
            fields = dataclasses.fields(EvalOptions)
            given = [each.name for each in fields if getattr(self, each.name) != each.default]
            if given:
                raise ConfigError(
                    f"--{given[0].replace('_', '-')} with a recipe without evaluation data; leave "
                    "the flag out, or give the recipe an eval_source"
                )
            return None
        epochs = self.eval_every_epochs
        return rx.Evaluation(
            source,
            every_epochs=1 if epochs is None and self.eval_every is None else epochs,
            every_steps=self.eval_every,
            at_start=self.eval_at_start,
            max_rows=self.eval_rows,
        )


@dataclasses.dataclass(frozen=True)
class RecordOptions:
    """Measurements, and where to write them besides the run's folder."""

    log_every: Annotated[Count | None, shown_as("N", "50, or fewer in a short run")] = None
    """Steps between two records."""
    log_format: Literal["text", "json"] = "text"
    """Format of what is printed: lines, or a JSON object for each line and each record."""
    log_to: Annotated[str | None, several_of(LOGGERS, "none")] = None
    """Also send records to these loggers, from a thread, so that training never waits."""
    gradient_norm: bool = False
    """Record the norm of the gradient, before it is clipped."""
    measure_noise_scale: bool = False
    """Measure the gradient noise scale every 10 steps, at the cost of one gradient each time."""
    profile: Annotated[str | None, shown_as("FIRST:LAST", "none")] = None
    """Record these steps with JAX's profiler, in profile/ of the run's folder."""
    dump_hlo: Annotated[Path | None, shown_as("FOLDER", "none")] = None
    """Write the step's StableHLO and optimized HLO as text into this folder."""


@dataclasses.dataclass(frozen=True)
class SaveOptions:
    """When the run is saved."""

    save_every: Annotated[Count | None, shown_as("N", "none")] = None
    """Steps between two checkpoints, instead of minutes."""
    save_minutes: NotNegative = 10.0
    """Minutes between two checkpoints, the first after one; 0 saves nothing to resume from."""
    keep: Count = 3
    """Number of newest checkpoints to keep."""
    keep_every: Annotated[Count | None, shown_as("N", "none")] = None
    """Also keep the checkpoints at multiples of N steps."""

    def saving(self) -> rx.Saving:
        """Return when to save checkpoints, and which to keep."""
        minutes = self.save_minutes or None
        return rx.Saving(
            every=self.save_every, minutes=minutes, keep=self.keep, keep_every=self.keep_every
        )


@dataclasses.dataclass(frozen=True)
class FaultOptions:
    """Faults to watch for, and when the run gives up."""

    audit_every: Annotated[Count | None, shown_as("N", "none")] = None
    """Steps between two audits, which compare the bits of all replicas."""
    on_divergence: Literal["stop", "restore"] = "stop"
    """If an audit finds a device whose bits differ: stop, or restore the last audited state."""
    max_bad_steps: Count = 5
    """Stop after this many consecutive skipped steps, whose loss or gradient is not finite."""
    skip_spikes: bool = False
    """Also skip a step whose loss is far above earlier ones."""


@dataclasses.dataclass(frozen=True)
class TrainOptions:
    """Options of `replicax train` for any recipe; each field is a group in --help."""

    start: StartOptions = StartOptions()
    compute: ComputeOptions = ComputeOptions()
    islands: IslandOptions = IslandOptions()
    eval: EvalOptions = EvalOptions()
    record: RecordOptions = RecordOptions()
    save: SaveOptions = SaveOptions()
    fault: FaultOptions = FaultOptions()

    def flat(self) -> dict[str, Any]:
        """The options by name, as `config.json` has them."""
        return {name: value for group in vars(self).values() for name, value in vars(group).items()}

    def hooks(self) -> list[rx.Hook]:
        """Return the hooks that the flags request."""
        record, hooks = self.record, list[rx.Hook]()
        if record.gradient_norm:
            hooks.append(rx.hooks.GradientNorm())
        if record.profile is not None:
            hooks.append(rx.hooks.Profile.parse(record.profile))
        if record.dump_hlo is not None:
            hooks.append(rx.hooks.DumpHLO(record.dump_hlo))
        if self.fault.audit_every is not None:
            hooks.append(rx.hooks.Audit(self.fault.audit_every, self.fault.on_divergence))
        if record.measure_noise_scale:
            hooks.append(rx.hooks.NoiseMeter(NOISE_EVERY))
        if self.eval.keep_best is not None:
            if not self.save.saving().wanted:
                raise ConfigError(
                    f"--keep-best {self.eval.keep_best} with --save-minutes 0, which saves "
                    "nothing; leave one of them out"
                )
            metric, mode = _with_direction(self.eval.keep_best)
            hooks.append(rx.hooks.KeepBest(metric, mode=mode))
        if self.eval.early_stopping is not None:
            hooks.append(_early_stopping(self.eval.early_stopping))
        names = words(record.log_to or "")
        return [*hooks, *(choose("--log-to", name, LOGGERS)() for name in dict.fromkeys(names))]


def train(arguments: list[str]) -> int:
    """Run the command; return its exit code."""
    parsed = parse_with_recipe("train", TrainOptions, arguments)
    options = parsed.options
    if options.start.run is None and (place := find_island(os.environ)) is not None:
        raise ConfigError(
            f"island {place.index} of {len(place.addresses)} without --run; each start would make "
            "a folder of its own, and two groups could train on apart: give all the same --run"
        )
    folder = run_folder(options.start.run, parsed.name)
    hooks, saving = options.hooks(), options.save.saving()
    options.compute.fix_threads(options.compute.mode)
    formatted = json_lines() if options.record.log_format == "json" else nullcontext()
    with unfailing_stdout(), formatted, Interrupt(at_once=_end_at_once) as interrupt:
        result = _run(parsed, hooks, run_dir=folder, saving=saving, interrupt=interrupt)
        if not result.interrupted:
            return 0
        said = f"interrupted after {result.steps} steps; what was recorded is kept"
        if result.exit_code == 75:
            said = f"stopped early with everything saved; start it again: --run {folder.name}"
        return failed(said, result.exit_code)


def _run(
    parsed: Arguments[TrainOptions], hooks: list[rx.Hook], *, run_dir: Path, **settings: Any
) -> Fit:
    options, recipe = parsed.options, parsed.recipe
    start, compute = options.start, options.compute
    job = rx.initialize()
    speaks = job.process == 0
    for hook in hooks if speaks else ():
        if isinstance(hook, rx.hooks.Logger):
            hook.check_installed()
    if compute.devices is not None:
        make_host_devices(compute.devices, job.processes)
    mesh = compute.mesh(compute.devices)
    rounds = options.islands.rounds(mesh, job)
    dp = compute.data_parallel(recipe, compute.mode, mesh, job, **rounds)
    if dp.mesh.devices.flat[0].platform == "cpu":
        keep_freed_memory()
    said = keep_programs(dp.mesh.devices.flat[0], prunes=speaks)
    if speaks:
        show(*data_lines(recipe))
        if said is not None:
            show(*labelled("cache", said))
    source, evaluation = recipe.train_source(), options.eval.evaluation(recipe.eval_source())
    model = initial_model(dp, recipe, start.seed)
    if start.init_from is not None:
        model = rx.load_weights(model, start.init_from, rename=weight_names(recipe))
    if compute.accumulate is None:
        dp = in_micro_batches(dp, model, source, recipe.batch_size, job)
    state = dp.init(model, seed=start.seed)
    if start.show_sharding and speaks:
        print_sharding(state, dp.split.padded(recipe.batch_size))
    saved = {name: value for name, value in options.flat().items() if name not in OF_THIS_START}
    saved["accumulate"] = dp.accumulate
    result = rx.fit(
        dp,
        state,
        source,
        batch_size=recipe.batch_size,
        epochs=None if start.steps is not None else recipe.epochs,
        steps=start.steps,
        eval_source=evaluation,
        seed=start.seed,
        steps_per_call=compute.steps_per_call,
        log_every=options.record.log_every,
        hooks=[*_figures(recipe, state), *hooks],
        guard=rx.Guard(options.fault.max_bad_steps, options.fault.skip_spikes),
        run_dir=run_dir,
        accept_changes=start.accept_changes,
        config={**parsed.about(), "fields": dataclasses.asdict(recipe), "options": saved},
        **settings,
    )
    if speaks:
        also = ", noise_scale.json" if options.record.measure_noise_scale else ""
        also += ", checkpoints/" if options.save.saving().wanted else ""
        show(*labelled("see", f"{run_dir}/ (config.json, records.jsonl, curves.png{also})"))
    if not result.interrupted and hasattr(recipe, "after_training"):
        model = dp.model(result.state, copy=False)  # on the devices of all processes
        shown = recipe.after_training(model)
        if shown and speaks:
            print(f"\n{shown}")
    return result


def in_micro_batches(
    dp: rx.DataParallel, model: Any, source: Any, rows: int, job: Job
) -> rx.DataParallel:
    """Return `dp` with the fewest micro-batches that fit in device memory, by formula.

    The result has one micro-batch if the batch fits at once, or in no number of micro-batches; if
    the devices do not report their memory; or if reading a row of the source would consume it. All
    processes use the number found by process 0, which prints it.
    """

    def fewest() -> int:
        if isinstance(source, ProcessLocal) or not can_shuffle(source):
            return 1
        target = attached_target(list(dp.mesh.devices.flat))
        try:
            step = in_fit(dp, model, target)
            row = first_rows(source, 1)
            at_once, fitting = at_once_and_fitting(step, model, row, rows, target)
        except Exception:  # training will raise it in context
            return 1
        if fitting is None:
            return 1
        count, room = fitting.accumulate, target.chip.usable_bytes
        assert room is not None, "checked by at_once_and_fitting"
        text = (
            f"{count} micro-batches of {fitting.need.rows // count:,} rows per device: in one they "
            f"would take {size_text(at_once.bytes)} of {size_text(room)}, by formula (--accumulate)"
        )
        show(*labelled("parts", text))
        return count

    return dp.replace(accumulate=job.broadcast("micro-batches", fewest))


def _figures(recipe: Any, state: TrainState) -> list[rx.Hook]:
    """Return the hooks of every run, which add figures to its metrics."""
    tokens = getattr(recipe, "tokens_per_row", None)
    hooks: list[rx.Hook] = [rx.hooks.Throughput(tokens), rx.hooks.DeviceMemory()]
    # A schedule belongs to the optimizer defined in the same class.
    owner = next(each for each in type(recipe).__mro__ if "optimizer" in vars(each))
    if "schedule" in vars(owner):
        hooks.append(
            rx.hooks.LearningRate(jax.jit(recipe.schedule()))
        )  # without jit it takes a second
    elif len(injected_rates(state)) == 1:
        hooks.append(rx.hooks.LearningRate())
    return hooks


def _end_at_once(number: int) -> None:
    """End all processes while there is nothing to save."""
    stop_all_now(f"{shown_signal(number)} before the first step; start it again to continue")


def _early_stopping(text: str) -> rx.hooks.EarlyStopping:
    """Return the hook for `accuracy`, `accuracy:5` or `accuracy:5:max`."""
    rest, mode = _with_direction(text)
    metric, colon, patience = rest.partition(":")
    if not metric or (colon and not (patience.isascii() and patience.isdecimal())):
        raise ConfigError(
            f"--early-stopping {text}; it must be a metric, and evaluations to wait: accuracy:5"
        )
    return rx.hooks.EarlyStopping(metric, *([int(patience)] if colon else []), mode=mode)


def _with_direction(text: str) -> tuple[str, Any]:
    """Return `score` and `max` of `score:max`; None if no direction is told."""
    metric, _, mode = text.rpartition(":")
    return (metric, mode) if metric and mode in ("min", "max") else (text, None)
