"""The step of a GPT on one CPU under options of XLA, interleaved with its defaults.

The step and sizes of `cpu_fusions.py`. An option that helps could be set for programs on CPUs, as
`DataParallel(compiler_options=)` is. Writes `results/cpu_options.json`: milliseconds, times the
default round by round, and the loss after two steps.
"""

import argparse
import functools
from typing import Any

import cpu_fusions
import jax
import numpy as np
from gpt import stepping
from timing import environment, interleaved, ratios, save, spread

import replicax as rx
from replicax.train.run.host_memory import keep_freed_memory

OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "concurrency scheduler": {"xla_cpu_enable_concurrency_optimized_scheduler": True},
    "products by XLA's loops": {cpu_fusions.OPTION: "", "xla_cpu_multi_thread_eigen": False},
    "one fusion each": {cpu_fusions.OPTION: cpu_fusions.FUSIONS["individual"]},
    "vectors of 512 bits": {"xla_cpu_prefer_vector_width": 512},
    "copies by region": {"xla_cpu_copy_insertion_use_region_analysis": True},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--only", nargs="*", default=list(OPTIONS), choices=OPTIONS)
    args = parser.parse_args()
    keep_freed_memory()
    loss, optimizer, model, rows = cpu_fusions.gpt(args.layers)
    steps, losses = {}, {}
    for name in dict.fromkeys(["default", *args.only]):  # which the others are compared with
        try:
            dp = rx.DataParallel(
                loss, optimizer, mesh=rx.make_mesh(1), mode="single", compiler_options=OPTIONS[name]
            )
            (batch,) = dp.feed(rows, 8)
            step = stepping(dp, dp.init(model), batch)
            losses[name] = step(2)[-1]
        except jax.errors.JaxRuntimeError as error:
            print(f"{name}: {str(error).splitlines()[0]}")
            continue
        steps[name] = functools.partial(step, 2)
    seconds = interleaved(steps, args.rounds, warmups=1)
    table = {
        name: {
            "milliseconds": [round(500 * value, 2) for value in spread(values)],
            "times_default": [round(v, 4) for v in spread(ratios(values, seconds["default"]))],
            "loss_after_2_steps": float(np.asarray(losses[name])),
        }
        for name, values in seconds.items()
    }
    for name, row in table.items():
        print(f"{name:<24} {row}")
    print(
        f"see {save('cpu_options', {'environment': environment(), **vars(args), 'steps': table})}"
    )


if __name__ == "__main__":
    main()
