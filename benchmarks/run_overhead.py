"""Overhead of a run with `rx.fit` or `rx.Run` over a bare loop of `DataParallel.step`.

LeNet at batch 256 and the MLP at its small default size, on one and two devices.

1. `bare`: batches of a feed and `dp.step`, nothing else.
2. `guarded`: the same loop with the step that skips bad updates, which runs use.
3. `run`: the same rows through `rx.Run` with its folder, records, curves, progress and timed
   checkpoints, which is the default of `rx.fit`.
4. `run with figures`: also with the figures that `replicax train` records.

All are interleaved in one process, with several steps each, and wait for their last step.

Goal: a median ratio of at most 1.02.
"""

import argparse
import contextlib
import functools
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
from timing import environment, interleaved, ratios, save, spread

import replicax as rx
from replicax.core.data.sources import as_source
from replicax.recipes.lenet import LeNet
from replicax.recipes.mlp import MLP
from replicax.train.guarded import guarded
from replicax.train.run.host_memory import keep_freed_memory

SUBJECTS = {"lenet": (LeNet(), 10), "mlp": (MLP(), 100)}
"""Recipe, and steps per round."""
AIM = 1.02


def forever(dp: rx.DataParallel, source: Any, batch_size: int) -> Iterator[Any]:
    """Yield batches forever, in a new order every epoch as in a run."""
    opened = as_source(source, batch_size, dp.job, shuffle=True, seed=0)
    epoch = 0
    while True:
        yield from dp.feed(opened, epoch=epoch)
        epoch += 1


def bare(dp: rx.DataParallel, recipe: Any, count: int) -> Callable[[], None]:
    """Return a function that runs `count` steps in a bare loop."""
    state = dp.init(recipe.model(jax.random.key(0)))
    batches = forever(dp, recipe.train_source(), recipe.batch_size)

    def go() -> None:
        nonlocal state
        for _ in range(count):
            state, metrics = dp.step(state, next(batches))
        jax.block_until_ready((state, metrics))

    return go


def steps_of(run: rx.Run, count: int) -> Callable[[], None]:
    """Return a function that runs `count` steps of `run`."""
    batches = iter(run)

    def go() -> None:
        for _ in range(count):
            metrics = run.step(next(batches))
        jax.block_until_ready((run.state, metrics))

    return go


def compare(recipe: Any, devices: int, rounds: int, count: int) -> dict[str, Any]:
    """Measure milliseconds per step of each, and the ratios of the runs to the bare loop."""
    mesh = rx.make_mesh(devices=jax.devices()[:devices])
    make = functools.partial(rx.DataParallel, recipe.loss, recipe.optimizer(), mesh=mesh)
    dp = make()
    figures = [rx.hooks.LearningRate(0.1), rx.hooks.Throughput(), rx.hooks.DeviceMemory()]
    hooks: dict[str, list[rx.Hook]] = {"run": [], "run with figures": figures}
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        stack.enter_context(contextlib.redirect_stdout(open(os.devnull, "w")))  # noqa: SIM115
        state = dp.init(recipe.model(jax.random.key(0)))
        runs = {
            "bare": bare(dp, recipe, count),
            "guarded": bare(guarded(dp, state), recipe, count),
        }
        for name, own in hooks.items():
            own_dp = make()  # a run takes the results of all steps of its DataParallel
            run = rx.Run(
                own_dp,
                own_dp.init(recipe.model(jax.random.key(0))),
                recipe.train_source(),
                batch_size=recipe.batch_size,
                steps=(rounds + 3) * count,
                run_dir=folder / name,
                hooks=own,
            )
            runs[name] = steps_of(stack.enter_context(run), count)
        seconds = interleaved(runs, rounds)
    each = {name: spread([value / count * 1e3 for value in seconds[name]]) for name in runs}
    ratio = {name: spread(ratios(seconds[name], seconds["bare"])) for name in [*runs][1:]}
    return {
        "steps_in_a_round": count,
        "milliseconds_per_step": {k: [round(x, 3) for x in values] for k, values in each.items()},
        "ratio": {name: [round(x, 4) for x in values] for name, values in ratio.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=60, help="interleaved rounds (default: 60)")
    args = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", 2)
    keep_freed_memory()
    result = {"environment": environment(), "rounds": args.rounds, "aim": AIM}
    print("median [quartiles]")
    for devices in (1, 2):
        for name, (recipe, count) in SUBJECTS.items():
            title = f"{name} on {devices} device{'s' * (devices > 1)}"
            found = compare(recipe, devices, args.rounds, count)
            result[title] = found
            for run, (middle, low, high) in found["milliseconds_per_step"].items():
                print(f"{title}, {run:<18} {middle:8.3f} [{low:.3f}, {high:.3f}] ms")
            for run, (middle, low, high) in found["ratio"].items():
                print(f"{title}, {run:<18} {middle:8.4f} [{low:.4f}, {high:.4f}] times bare")
    print(f"see {save('run_overhead', result)}")


if __name__ == "__main__":
    main()
