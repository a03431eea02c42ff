"""The command line: argv -> calls -> exit code.

0 done · 1 the run failed, with its cause in one line · 2 a wrong flag or configuration
"""

import contextlib
import dataclasses
import importlib.metadata
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

from replicax.errors import ConfigError, ReplicaxError, did_you_mean

USAGE = """\
usage: replicax COMMAND ...

Data-parallel training for JAX that proves itself.

commands:
  train RECIPE [FLAGS]   train a recipe; replicax train RECIPE --help lists its flags
  recipes                list the built-in recipes

A recipe is a built-in name, your own as file.py:Name, or package.module:Name.

options:
  -h, --help             show this help
  --version              show the version
"""


@dataclasses.dataclass(frozen=True)
class TrainOptions:
    """How to run a recipe, whichever it is."""

    devices: int | None = None
    """Devices to train on; all by default. On a CPU: that many host devices."""
    mode: Literal["jit", "shard_map", "pmap", "single"] = "jit"
    """How the step is lifted to the devices."""
    layout: Literal["replicated", "zero1", "fsdp"] = "replicated"
    """Where the training state lives."""
    accumulate: int = 1
    """Micro-batches that each device computes one after the other."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """Dtype the model computes in; parameters and optimizer stay in float32."""
    steps: int | None = None
    """Updates, instead of epochs."""
    seed: int = 0
    """Of the initial model, the order of the data, and all else that is random."""
    log_every: int = 50
    """Steps between two records."""
    show_sharding: bool = False
    """Draw where the parameters and the batch live, before training."""
    run: str | None = None
    """Name of the run's folder in runs/; recipe and time by default."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        return _dispatch(arguments)
    except SystemExit as stop:  # --help
        return int(stop.code or 0)
    except ReplicaxError as error:
        return _failed(str(error), error.exit_code)
    except KeyboardInterrupt:
        return _failed("interrupted", 1)
    except Exception as error:  # a recipe's own: its author needs the traceback
        traceback.print_exc()
        return _failed(f"{type(error).__name__}: {error}", 1)


def _dispatch(arguments: list[str]) -> int:
    commands: dict[str, Callable[[list[str]], int]] = {"train": _train, "recipes": _recipes}
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE, end="")
        return 0 if arguments else 2
    command, *rest = arguments
    if command == "--version":
        print(f"replicax {importlib.metadata.version('replicax')}")
        return 0
    if command not in commands:
        raise ConfigError(
            f"no command {command!r}; there are {', '.join(commands)}"
            f"{did_you_mean(command, commands)}"
        )
    return commands[command](rest)


def _recipes(arguments: list[str]) -> int:
    if arguments and arguments[0] not in ("-h", "--help"):
        raise ConfigError(f"recipes takes no argument {arguments[0]!r}; leave it out")
    from replicax.recipes.recipe import BUILT_IN, find_recipe

    for name in BUILT_IN:
        try:
            text = (find_recipe(name).__doc__ or "").splitlines()[0]
        except ReplicaxError as error:
            text = f"not available: {error}"
        print(f"{name:<18} {text}")
    print(f"{'file.py:Name':<18} your own; replicax train RECIPE --help lists the flags of any")
    return 0


def _train(arguments: list[str]) -> int:
    if not arguments or arguments[0].startswith("-"):
        if arguments and arguments[0] in ("-h", "--help"):
            print("usage: replicax train RECIPE [FLAGS]\n")
            print("replicax recipes lists the recipes; replicax train RECIPE --help the flags.")
            return 0
        raise ConfigError("train needs a recipe before its flags; replicax recipes lists them")
    from replicax.flags import parse_flags
    from replicax.recipes.recipe import find_recipe, recipe_name

    spec, *flags = arguments
    recipe_class = find_recipe(spec)
    program = f"replicax train {spec}"
    options, recipe, preset = parse_flags(recipe_class, TrainOptions, flags, program)
    config = {
        "recipe": spec,
        "preset": preset,
        "fields": dataclasses.asdict(recipe),
        "options": dataclasses.asdict(options),
    }
    return _run_training(recipe_name(recipe_class), recipe, options, config)


def _run_training(name: str, recipe: Any, options: TrainOptions, config: dict[str, Any]) -> int:
    import jax

    import replicax as rx
    from replicax.parallel.mesh import by_rows
    from replicax.train.host_memory import keep_freed_memory
    from replicax.train.sharding_view import abstract_batch, sharding_view

    mesh = _mesh(options)
    if mesh.devices.flat[0].platform == "cpu":
        keep_freed_memory()
    dp = rx.DataParallel(
        recipe.loss,
        recipe.optimizer(),
        mesh=mesh,
        mode=options.mode,
        layout=options.layout,
        accumulate=options.accumulate,
        precision=options.precision,
    )
    state = dp.init(recipe.model(jax.random.key(options.seed)), seed=options.seed)
    if hasattr(recipe, "data_description"):
        print(f"data   {recipe.data_description()}", flush=True)
    source = recipe.train_source()
    if options.show_sharding:
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
        run_dir=folder,
        config=config,
        title=f"{name} · {dp.mesh.devices.size} devices · {options.mode}",
    )
    print(f"see    {folder}/ (config.json, records.jsonl, curves.png)")
    if result.interrupted:
        return _failed(f"interrupted after {result.steps} steps; what was recorded is kept", 1)
    if hasattr(recipe, "after_training") and (
        said := recipe.after_training(dp.model(result.state))
    ):
        print(f"\n{said}")
    return 0


def _mesh(options: TrainOptions) -> Any:
    """A mesh of the first `--devices` devices; host devices are made to order."""
    import jax

    import replicax as rx

    wanted = options.devices
    if wanted is not None and wanted < 1:
        raise ConfigError(f"--devices {wanted}; a run needs at least 1: raise it")
    if wanted is not None:
        with contextlib.suppress(RuntimeError):  # the backend is up: its devices are what they are
            jax.config.update("jax_num_cpu_devices", wanted)
    if wanted is None:
        wanted = 1 if options.mode == "single" else -1
    return rx.make_mesh(data=wanted)


def _failed(message: str, code: int) -> int:
    line = " ".join(message.split())
    print(f"replicax: {line}", file=sys.stderr)
    return code
