"""First call of a custom step, and of the same step written by hand in plain JAX.

One process; in each round every variant is a fresh copy of its module, so that nothing is traced or
compiled for it before, and all are interleaved. `jit` is a full batch; `padded` one whose feed will
pad its last batch, which is examined too. Goal: at most 1.3 times plain JAX. Writes
`results/first_call.json`: wall and CPU milliseconds, traces of the step, and programs compiled.
"""

import argparse
import collections
import gc
import random
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
from own_step import by_hand
from timing import environment, ratios, save, spread

import replicax as rx

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
NAMES = ("wgan_gp", "ppo")
VARIANTS = ("plain", "jit", "padded", "shard_map")
counts: collections.Counter[str] = collections.Counter()


def module(name: str) -> Any:
    """Return a fresh copy of an example."""
    made = types.ModuleType(name)
    text = (EXAMPLES / f"{name}.py").read_text(encoding="utf-8")
    exec(compile(text, name, "exec"), made.__dict__)
    return made


def mean(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: jnp.mean(leaf, axis=0), tree)


def prepared(example: Any, variant: str) -> Callable[[], Any]:
    """Return the first call of a step, its state and batch in place."""
    step, rows = example.step, example.rows()

    def counted(*given: Any) -> Any:
        counts["step"] += 1
        return step(*given)

    full = example.BATCH
    data = jax.tree.map(lambda leaf: leaf[: full if variant != "padded" else None], rows)
    if variant == "plain":
        state, batch, key = example.state(), jax.device_put(data), jax.random.key(0)

        def plain(state: Any, batch: Any, key: Any) -> Any:
            with (
                mock.patch.object(rx, "value_and_grad", by_hand),
                mock.patch.object(rx, "mean", mean),
            ):
                return counted(state, batch, key)

        call = jax.jit(plain, donate_argnums=0)
        return lambda: call(state, batch, key)
    mesh = rx.make_mesh(devices=jax.devices()[:1])
    mode = "shard_map" if variant == "shard_map" else "jit"
    dp = rx.DataParallel(step=counted, mode=mode, mesh=mesh)
    trained = dp.init(example.state())
    placed = next(iter(dp.feed(data, full, prefetch=0)))
    return lambda: dp.step(trained, placed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--examples", nargs="*", default=NAMES)
    parser.add_argument("--variants", nargs="*", default=VARIANTS)
    args = parser.parse_args()
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, *_, **__: counts.update([event])
    )
    order, result = random.Random(0), {"environment": environment(), "rounds": args.rounds}
    for name in args.examples:
        wall: dict[str, list[float]] = {variant: [] for variant in args.variants}
        cpu: dict[str, list[float]] = {variant: [] for variant in args.variants}
        seen: dict[str, dict[str, int]] = {}
        for number in range(args.rounds + 1):
            for variant in order.sample(args.variants, len(args.variants)):
                call = prepared(module(name), variant)
                gc.collect()
                counts.clear()
                began, worked = time.perf_counter(), time.process_time()
                jax.block_until_ready(call())
                took = time.perf_counter() - began, time.process_time() - worked
                if not number:
                    continue  # functions of JAX's own are traced in the first round
                wall[variant].append(took[0])
                cpu[variant].append(took[1])
                seen[variant] = {
                    "steps traced": counts["step"],
                    "jaxprs": counts["/jax/core/compile/jaxpr_trace_duration"],
                    "compiled": counts["/jax/core/compile/backend_compile_duration"],
                }
        result[name] = {
            variant: {
                "wall ms": spread([1e3 * each for each in wall[variant]]),
                "cpu ms": spread([1e3 * each for each in cpu[variant]]),
                "wall / plain": spread(ratios(wall[variant], wall["plain"])),
                "cpu / plain": spread(ratios(cpu[variant], cpu["plain"])),
                **seen[variant],
            }
            for variant in args.variants
        }
        for variant, each in result[name].items():
            print(name, variant, each, flush=True)
    print(save("first_call", result), file=sys.stderr)


if __name__ == "__main__":
    main()
