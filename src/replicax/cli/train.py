"""`replicax train`: a recipe, trained, evaluated and recorded."""

import dataclasses
from pathlib import Path
from typing import Any

import jax

import replicax as rx
from replicax.cli import failed
from replicax.cli.flags import Arguments, parse_with_recipe
from replicax.cli.output import run_folder
from replicax.cli.sharding import print_sharding
from replicax.cli.step_options import first_rows, make_host_devices, print_data
from replicax.cli.train_options import TrainOptions, check_installed
from replicax.cluster.failure import stop_all_now
from replicax.core.job import Job
from replicax.core.sources import PerProcess, can_shuffle
from replicax.core.update import TrainState
from replicax.plan.cells import line
from replicax.plan.largest import at_once_and_fitting
from replicax.plan.steps import in_fit
from replicax.plan.target import attached_target
from replicax.train.hooks.figures import injected_rates
from replicax.train.host_memory import keep_freed_memory
from replicax.train.stopping import Interrupt, signal_name
from replicax.train.summary import Fit
from replicax.wording import size_text

OF_THIS_START = ("accept_changes", "config")
"""Options that are none of the run's."""


def train(arguments: list[str]) -> int:
    """Run the command; return its exit code."""
    parsed = parse_with_recipe("train", TrainOptions, arguments)
    options = parsed.options
    folder = run_folder(options.start.run, parsed.name)
    hooks, saving = options.hooks(), options.save.saving()
    options.compute.fix_threads(options.compute.mode)
    with Interrupt(at_once=_end_at_once) as interrupt:
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
    if speaks:
        check_installed(hooks)
    if compute.devices is not None:
        make_host_devices(compute.devices, job.processes)
    mesh = compute.mesh(compute.devices)
    dp = compute.data_parallel(recipe, compute.mode, mesh, job)
    if dp.mesh.devices.flat[0].platform == "cpu":
        keep_freed_memory()
    if speaks:
        print_data(recipe)
    source, evaluation = recipe.train_source(), options.eval.evaluation(recipe.eval_source())
    model = recipe.model(jax.random.key(start.seed))
    if compute.accumulate is None:
        dp = in_micro_batches(dp, model, source, recipe.batch_size, job)
    state = dp.init(model, seed=start.seed)
    if start.show_sharding and speaks:
        print_sharding(state, dp.split.padded(recipe.batch_size))
    told = {name: value for name, value in options.flat().items() if name not in OF_THIS_START}
    told["accumulate"] = dp.accumulate
    result = rx.fit(
        dp,
        state,
        source,
        batch_size=recipe.batch_size,
        epochs=None if start.steps is not None else recipe.epochs,
        steps=start.steps,
        eval_source=evaluation,
        seed=start.seed,
        log_every=options.record.log_every,
        hooks=[*_figures(recipe, state), *hooks],
        guard=rx.Guard(options.fault.max_bad_steps, options.fault.skip_spikes),
        run_dir=run_dir,
        accept_changes=start.accept_changes,
        config={**parsed.about(), "fields": dataclasses.asdict(recipe), "options": told},
        **settings,
    )
    if speaks:
        also = ", noise_scale.json" if options.record.measure_noise_scale else ""
        also += ", checkpoints/" if options.save.saving().wanted else ""
        print(f"see    {run_dir}/ (config.json, records.jsonl, curves.png{also})")
    if not result.interrupted and hasattr(recipe, "after_training"):
        model = dp.model(result.state, copy=False)  # on the devices of all processes
        shown = recipe.after_training(model)
        if shown and speaks:
            print(f"\n{shown}")
    return result


def in_micro_batches(
    dp: rx.DataParallel, model: Any, source: Any, rows: int, job: Job
) -> rx.DataParallel:
    """Return `dp` with as few micro-batches as the memory of its devices takes, by formula.

    One is left as it is: where the batch fits at once, or in no number of them; where the devices
    do not tell their memory; where looking at a row of the source would use it up. All processes
    take what the first one finds, which prints it.
    """
    count = job.broadcast("micro-batches", lambda: _count(dp, model, source, rows))
    return dp.replace(accumulate=count)


def _count(dp: rx.DataParallel, model: Any, source: Any, rows: int) -> int:
    if isinstance(source, PerProcess) or not can_shuffle(source):
        return 1
    target = attached_target(list(dp.mesh.devices.flat))
    try:
        step = in_fit(dp, model, target)
        at_once, fitting = at_once_and_fitting(step, model, first_rows(source, 1), rows, target)
    except Exception:  # the training to come says it where it belongs
        return 1
    if fitting is None:
        return 1
    count, room = fitting.accumulate, target.chip.usable_bytes
    assert room is not None, "or nothing would have been sought"
    text = (
        f"{count} micro-batches of {fitting.need.rows // count:,} rows a device: at once they "
        f"would take {size_text(at_once.bytes)} of {size_text(room)}, by formula (--accumulate)"
    )
    print(*line("parts", text), sep="\n", flush=True)
    return count


def _figures(recipe: Any, state: TrainState) -> list[rx.Hook]:
    """Hooks of every run: figures beside its metrics."""
    hooks: list[rx.Hook] = [rx.Throughput(getattr(recipe, "tokens_per_row", None))]
    hooks.append(rx.DeviceMemory())
    if _has_schedule(type(recipe)):
        hooks.append(rx.LearningRate(jax.jit(recipe.schedule())))  # op by op it takes a second
    elif len(injected_rates(state)) == 1:
        hooks.append(rx.LearningRate())
    return hooks


def _has_schedule(recipe: type[Any]) -> bool:
    """Whether the recipe's `schedule` is of its `optimizer`, and not of one that it inherited."""
    owners = (each for each in recipe.__mro__ if "optimizer" in vars(each))
    return "schedule" in vars(next(owners))


def _end_at_once(number: int) -> None:
    """End the process, and with it the others, while nothing is lost by it."""
    stop_all_now(f"{signal_name(number)} before the first step; start it again to go on")
