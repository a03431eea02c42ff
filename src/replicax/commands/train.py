"""`replicax train`: a recipe, trained, evaluated and recorded."""

import dataclasses
import time
from pathlib import Path
from typing import Any, Literal

import jax

import replicax as rx
from replicax.commands.arguments import parse_arguments
from replicax.commands.data import print_data
from replicax.commands.devices import make_host_devices, of_this_process
from replicax.commands.parallel import parallel_of
from replicax.errors import ConfigError
from replicax.parallel.canonical import MICRO_SHARDS
from replicax.parallel.mesh import by_rows
from replicax.parallel.threads import fix_threads
from replicax.train.fit import Fit
from replicax.train.host_memory import keep_freed_memory
from replicax.train.sharding_view import abstract_batch, sharding_view

NOISE_EVERY = 10
"""Steps between two samples of the gradient noise. It takes hundreds where batches are small."""


@dataclasses.dataclass(frozen=True)
class TrainOptions:
    """How to run a recipe, whichever it is."""

    devices: int | None = None
    """Devices to train on, of all processes together; all by default. On a CPU: that many host
    devices."""
    mode: Literal["jit", "shard_map", "pmap", "single", "exact"] = "jit"
    """How the step is lifted to the devices; exact gives the same bits on any number of them."""
    layout: Literal["replicated", "zero1", "fsdp"] = "replicated"
    """Where the training state lives."""
    accumulate: int = 1
    """Micro-batches that each device computes one after the other."""
    micro_shards: int = MICRO_SHARDS
    """In mode exact: the parts of a global batch, which all device counts must share; a power of
    two."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """Dtype the model computes in; parameters and optimizer stay in float32."""
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
    run: str | None = None
    """Name of the run's folder in runs/; recipe and time by default."""


def train(arguments: list[str]) -> str | None:
    """Run the command; returns why it ended early, or None."""
    parsed = parse_arguments("train", TrainOptions, arguments)
    if parsed is None:
        return None
    options, recipe = parsed.options, parsed.recipe
    if options.mode == "exact":
        fix_threads(options.micro_shards)
    rx.initialize()
    config = {**parsed.to_config(), "options": dataclasses.asdict(options)}
    result = _run(parsed.name, recipe, options, config)
    if result.interrupted:
        return f"interrupted after {result.steps} steps; what was recorded is kept"
    return None


def _run(name: str, recipe: Any, options: TrainOptions, config: dict[str, Any]) -> Fit:
    mesh = _mesh(options)
    if mesh.devices.flat[0].platform == "cpu":
        keep_freed_memory()
    dp = parallel_of(recipe, options, mesh)
    state = dp.init(recipe.model(jax.random.key(options.seed)), seed=options.seed)
    speaks = jax.process_index() == 0
    if speaks:
        print_data(recipe)
    source = recipe.train_source()
    if options.show_sharding and speaks:
        batch = abstract_batch(source, dp.split.padded(recipe.batch_size), by_rows(dp.mesh))
        print(*sharding_view(state, batch), sep="\n", flush=True)
    folder = Path("runs") / (options.run or f"{name}-{time.strftime('%Y%m%d-%H%M%S')}")
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
        audit_every=options.audit_every,
        on_divergence=options.on_divergence,
        measure_noise_every=NOISE_EVERY if options.measure_noise_scale else None,
        run_dir=folder,
        config=config,
        title=f"{name} · {dp.mesh.devices.size} devices · {options.mode}",
    )
    if speaks:
        also = ", noise_scale.json" if options.measure_noise_scale else ""
        print(f"see    {folder}/ (config.json, records.jsonl, curves.png{also})")
    if not result.interrupted and hasattr(recipe, "after_training"):
        shown = recipe.after_training(dp.model(result.state))  # on the devices of all processes
        if shown and speaks:
            print(f"\n{shown}")
    return result


def _mesh(options: TrainOptions) -> jax.sharding.Mesh:
    """A mesh of the first `--devices` devices."""
    wanted = options.devices
    if wanted is None:
        return rx.make_mesh(data=1 if options.mode == "single" else -1)
    if wanted < 1:
        raise ConfigError(f"--devices {wanted}; a run needs at least 1: raise it")
    make_host_devices(of_this_process(wanted))
    return rx.make_mesh(data=wanted)
