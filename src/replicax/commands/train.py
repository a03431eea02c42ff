"""`replicax train`: a recipe, trained, evaluated and recorded."""

import dataclasses
import math
import re
import time
from pathlib import Path
from typing import Any, Literal

import jax

import replicax as rx
from replicax.cluster.failure import stop_all_now
from replicax.commands.arguments import parse_arguments
from replicax.commands.data import print_data
from replicax.commands.devices import make_host_devices
from replicax.commands.output import failed
from replicax.commands.sharding import print_sharding
from replicax.commands.step import DeviceOptions, ModeOptions, StepOptions
from replicax.core.job import Job
from replicax.errors import ConfigError
from replicax.train.host_memory import keep_freed_memory
from replicax.train.interrupt import Interrupt, signal_name
from replicax.train.result import Fit

NOISE_EVERY = 10
"""Steps between two samples of the gradient noise. It takes hundreds where batches are small."""

OF_THIS_START = ("accept_changes", "config")
"""Options that are none of the run's."""


@dataclasses.dataclass(frozen=True)
class TrainOptions(StepOptions, ModeOptions, DeviceOptions):
    """How to run a recipe, whichever it is."""

    steps: int | None = None
    """Updates, instead of epochs."""
    seed: int = 0
    """Of the initial model, the order of the data, and all else that is random."""
    log_every: int = 50
    """Steps between two records."""
    audit_every: int | None = None
    """Steps between two audits, which compare the bits of all replicas; none by default."""
    on_divergence: Literal["stop", "restore"] = "stop"
    """What to do when an audit finds a device with other bits: stop, or go back to the state of the
    last clean audit and on from there."""
    measure_noise_scale: bool = False
    """Measure the gradient noise scale every 10 steps, each time at the cost of about a gradient:
    up to which batch size larger batches pay. It is kept in noise_scale.json."""
    show_sharding: bool = False
    """Draw where the parameters and the batch live, before training."""
    max_bad_steps: int = 5
    """A step whose loss or gradient is not finite is skipped; after so many in a row the run
    stops."""
    skip_spikes: bool = False
    """Skip also a step whose loss is far above those before."""
    run: str | None = None
    """Name of the run, and of its folder in runs/; recipe and time by default. A run that is there
    already goes on where it was saved."""
    save_every: int | None = None
    """Steps between two checkpoints, instead of minutes."""
    save_minutes: float = 10.0
    """Minutes between two checkpoints; 0 saves nothing, and such a run cannot be continued."""
    keep: int = 3
    """How many of the newest checkpoints stay."""
    keep_every: int | None = None
    """Checkpoints at a multiple of so many steps stay as well."""
    config: Path | None = None
    """The config.json of a run: its options and the recipe's fields, for the other flags to go on
    top. The run's name is not taken from it."""
    accept_changes: bool = False
    """Continue a run although its configuration has changed; each change is printed."""

    def hooks(self) -> list[rx.Hook]:
        """What observes the run, as far as flags ask for it."""
        hooks: list[rx.Hook] = []
        if self.audit_every is not None:
            hooks.append(rx.Audit(self.audit_every, self.on_divergence))
        if self.measure_noise_scale:
            hooks.append(rx.NoiseMeter(NOISE_EVERY))
        return hooks

    def saving(self) -> rx.Saving:
        """When a checkpoint is taken, and which are kept."""
        minutes = self.save_minutes or None
        return rx.Saving(
            every=self.save_every, minutes=minutes, keep=self.keep, keep_every=self.keep_every
        )


def train(arguments: list[str]) -> int:
    """Run the command; return its exit code."""
    parsed = parse_arguments("train", TrainOptions, arguments)
    if parsed is None:
        return 0
    options, recipe = parsed.options, parsed.recipe
    folder = _folder(parsed.name, options)
    options.fix_threads(options.mode)
    with Interrupt(at_once=_end_at_once) as interrupt:
        job = rx.initialize()
        told = dataclasses.asdict(options)
        told = {name: value for name, value in told.items() if name not in OF_THIS_START}
        config = {**parsed.to_config(), "options": told}
        result = _run(parsed.name, recipe, options, config, folder, job, interrupt)
    if not result.interrupted:
        return 0
    said = f"interrupted after {result.steps} steps; what was recorded is kept"
    if result.exit_code == 75:
        said = f"stopped early with everything saved; start it again: --run {folder.name}"
    return failed(said, result.exit_code)


def _run(
    name: str,
    recipe: Any,
    options: TrainOptions,
    config: dict[str, Any],
    folder: Path,
    job: Job,
    interrupt: Interrupt,
) -> Fit:
    mesh = None
    if options.devices is not None:
        make_host_devices(options.devices, job.processes)
        mesh = rx.make_mesh(options.devices)
    dp = options.data_parallel(recipe, options.mode, mesh, job)
    if dp.mesh.devices.flat[0].platform == "cpu":
        keep_freed_memory()
    state = dp.init(recipe.model(jax.random.key(options.seed)), seed=options.seed)
    speaks = job.process == 0
    if speaks:
        print_data(recipe)
    source = recipe.train_source()
    if options.show_sharding and speaks:
        print_sharding(state, dp.split.padded(recipe.batch_size))
    result = rx.fit(
        dp,
        state,
        source,
        batch_size=recipe.batch_size,
        epochs=None if options.steps is not None else recipe.epochs,
        steps=options.steps,
        eval_source=recipe.eval_source(),
        seed=options.seed,
        log_every=options.log_every,
        hooks=options.hooks(),
        guard=rx.Guard(options.max_bad_steps, options.skip_spikes),
        run_dir=folder,
        saving=options.saving(),
        accept_changes=options.accept_changes,
        config=config,
        interrupt=interrupt,
    )
    if speaks:
        also = ", noise_scale.json" if options.measure_noise_scale else ""
        also += ", checkpoints/" if options.save_minutes or options.save_every else ""
        print(f"see    {folder}/ (config.json, records.jsonl, curves.png{also})")
    if not result.interrupted and hasattr(recipe, "after_training"):
        model = dp.model(result.state, copy=False)  # on the devices of all processes
        shown = recipe.after_training(model)
        if shown and speaks:
            print(f"\n{shown}")
    return result


def _folder(name: str, options: TrainOptions) -> Path:
    """The run's own, below runs/.

    Raises:
        ConfigError: a name that is no folder's there.
    """
    if not 0 <= options.save_minutes < math.inf:
        raise ConfigError(f"--save-minutes {options.save_minutes:g}; it is at least 0: change it")
    run = options.run
    if run is None:
        run = f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._+=@-]{0,99}", run):
        raise ConfigError(
            f"--run {run!r}; it names a folder in runs/, with letters, digits and ._+=@- and at "
            "most 100 of them: choose another"
        )
    return Path("runs") / run


def _end_at_once(number: int) -> None:
    """End the process, and with it the others, while nothing is lost by it."""
    stop_all_now(f"{signal_name(number)} before the first step; start it again to go on")
