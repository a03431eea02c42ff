"""A step of Muon where each matrix has one owner, beside one where each device repeats all.

GPT-2 at its default size on CPU devices, one row of 128 bytes on each, so that the optimizer is a
large part of a step, with Muon for the matrices of the blocks, and with AdamW alone. Interleaved
rounds in one process. Devices share the cores of this machine: what each of them repeats costs as
many times the work, where a GPU each would do it at the same time.
"""

import argparse
from typing import Any

import jax
from timing import environment, interleaved, ratios, save, spread

import replicax as rx
from replicax.analysis.compiled import inspect
from replicax.recipes.gpt2 import GPT2

DEVICES = (2, 4)


def step_of(devices: int, layout: str, muon: float | None) -> tuple[Any, dict[str, float]]:
    """Return a function that does a step and waits for it, and figures of its program."""
    recipe = GPT2(muon_learning_rate=muon)
    mesh = rx.make_mesh(devices=jax.devices()[:devices])
    dp = rx.DataParallel(
        recipe.loss, recipe.optimizer(), mesh=mesh, mode="shard_map", layout=layout
    )
    state = dp.init(recipe.model(jax.random.key(0)))
    batch = next(iter(dp.feed(recipe.train_source(), batch_size=devices)))
    held = [state]

    def run() -> None:
        held[0], _ = dp.step(held[0], batch)
        jax.block_until_ready(held[0])

    run()
    [compiled] = dp.program(held[0]).step.compiled(held[0], batch)
    found = inspect(compiled)
    assert found.memory is not None
    return run, {
        "flops_per_device": found.flops,
        "sent_bytes": found.sent_bytes,
        "argument_bytes": found.memory.arguments,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15, help="interleaved rounds (default: 15)")
    args = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", max(DEVICES))
    result: dict[str, Any] = {"environment": environment(), "rounds": args.rounds}
    ways = {
        "muon, replicated": ("replicated", 0.02),
        "muon, zero1": ("zero1", 0.02),
        "adamw, replicated": ("replicated", None),
        "adamw, zero1": ("zero1", None),
    }
    for devices in DEVICES:
        made = {name: step_of(devices, *way) for name, way in ways.items()}
        seconds = interleaved({name: run for name, (run, _) in made.items()}, args.rounds)
        for name, (_, figures) in made.items():
            middle, low, high = spread([1e3 * each for each in seconds[name]])
            ratio = spread(ratios(seconds[name], seconds["muon, replicated"]))
            result[f"{name}, {devices} devices"] = {
                "milliseconds": [round(each, 1) for each in (middle, low, high)],
                "ratio": [round(each, 3) for each in ratio],
                **figures,
            }
            print(
                f"{devices} devices, {name:<18} {middle:6.1f} [{low:.1f}, {high:.1f}] ms, "
                f"{ratio[0]:.2f} [{ratio[1]:.2f}, {ratio[2]:.2f}] times Muon replicated, "
                f"{figures['flops_per_device'] / 1e9:.2f} GFLOP, "
                f"{figures['sent_bytes'] / 1e6:.2f} MB sent, "
                f"{figures['argument_bytes'] / 1e6:.2f} MB of arguments"
            )
    print(f"see {save('muon_step', result)}")


if __name__ == "__main__":
    main()
