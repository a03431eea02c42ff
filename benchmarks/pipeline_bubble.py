"""Measured pipeline bubble: two stages on two CPU devices, both schedules.

A micro-batch has the same rows for any number of micro-batches M, so a step of S stages should take
`T(M) = (M + S - 1) t + c`: t for a micro-batch in one stage, forward and backward, and c for the
rest of the step. A line fit to the times of a round gives both. The measured bubble is
`1 - M t / T(M)`, also without c; the computed one is `(S - 1) / (M + S - 1)`.

`lost` needs no fit: the share of both devices' time that the same step on one device does not need.
It includes the bubble and all other costs of stages: c, communication, recomputation.

The layers are many and small, so XLA computes each in one thread. With larger layers, the idle
stage's core would help the other stage and hide the bubble.
"""

import argparse
import os
from collections.abc import Callable
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "2")

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P
from timing import environment, interleaved, save, spread

import replicax as rx
from replicax.core.placement.pipeline_schedules import SCHEDULES, bubble

STAGES = 2
MICRO_BATCHES = (1, 2, 4, 8)
ROWS, WIDTH, LAYERS = 32, 64, 128
"""Rows per micro-batch, width of a layer, layers in both stages."""
STEPS = 16
"""Steps per round for the largest batch; smaller batches take more."""
ONE = "one device"


def loss(model: Any, batch: Any, key: Any) -> jax.Array:
    def layer(x: jax.Array, weight: jax.Array) -> tuple[jax.Array, None]:
        return x + jnp.tanh(x @ weight), None

    x, _ = jax.lax.scan(layer, batch["x"], model["layers"])
    return jnp.mean(x**2, axis=-1)


def step_of(schedule: str, micro_batches: int) -> tuple[Callable[[], None], int]:
    """Return a function that runs some steps, and their number."""
    random = np.random.default_rng(0)
    layers = random.normal(size=(LAYERS, WIDTH, WIDTH)) / (LAYERS * WIDTH)
    rows = ROWS * micro_batches
    source = {"x": random.normal(size=(rows, WIDTH)).astype(np.float32)}
    stages, layout = 1, rx.layout()
    if schedule != ONE:
        rules = [("layers", P("stage"))]
        stages, layout = STAGES, rx.layout(rules=rules, schedule=schedule)
    mesh = rx.make_mesh(1, stage=stages, devices=jax.devices())
    optimizer = optax.sgd(1e-3)
    dp = rx.DataParallel(loss, optimizer, mesh=mesh, layout=layout, accumulate=micro_batches)
    (batch,) = dp.feed(source, rows)
    state = dp.init({"layers": jnp.asarray(layers, jnp.float32)})
    count = STEPS * max(MICRO_BATCHES) // micro_batches

    def run() -> None:
        nonlocal state
        for _ in range(count):
            state, metrics = dp.step(state, batch)
        jax.block_until_ready((state, metrics))

    return run, count


def line(seconds: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Fit the times `[rounds, M]` over M; return slope and intercept per round."""
    slope, intercept = np.polyfit(MICRO_BATCHES, seconds.T, 1)
    return slope, intercept


def quartiles(values: np.ndarray) -> tuple[float, float, float]:
    """Return the median and quartiles."""
    return spread(values.tolist())


def figures(seconds: np.ndarray, alone: np.ndarray) -> dict[str, Any]:
    """Return a schedule's bubbles; `seconds` and `alone` (one device) are `[rounds, M]`."""
    t, intercept = line(seconds)
    c = intercept - (STAGES - 1) * t
    rows = []
    for place, count in enumerate(MICRO_BATCHES):
        whole = seconds[:, place]
        shares = {
            "measured_bubble": 1 - count * t / whole,
            "measured_bubble_without_c": 1 - count * t / (whole - c),
            "lost": 1 - alone[:, place] / (STAGES * whole),
        }
        rows.append(
            {
                "micro_batches": count,
                "milliseconds": quartiles(1e3 * whole),
                "computed_bubble": bubble(STAGES, count),
                **{name: quartiles(each) for name, each in shares.items()},
            }
        )
    fit = {"t_milliseconds": quartiles(1e3 * t), "c_milliseconds": quartiles(1e3 * c)}
    return {**fit, "steps": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=30)
    rounds = parser.parse_args().rounds
    cases = [(name, count) for name in (ONE, *SCHEDULES) for count in MICRO_BATCHES]
    steps = {f"{name} {count}": step_of(name, count) for name, count in cases}
    timed = interleaved({name: run for name, (run, _) in steps.items()}, rounds)
    seconds = {
        name: np.array([timed[f"{name} {m}"] for m in MICRO_BATCHES]).T
        / [steps[f"{name} {m}"][1] for m in MICRO_BATCHES]
        for name in (ONE, *SCHEDULES)
    }
    result: dict[str, Any] = {"environment": environment(), "rounds": rounds, "stages": STAGES}
    result["rows_width_layers"] = (ROWS, WIDTH, LAYERS)
    result[ONE] = {"milliseconds": [quartiles(1e3 * each) for each in seconds[ONE].T]}
    for name in SCHEDULES:
        result[name] = figures(seconds[name], seconds[ONE])
        t, c = (result[name][f"{each}_milliseconds"][0] for each in "tc")
        print(f"{name}: t {t:.3g} ms, c {c:.3g} ms")
        for row in result[name]["steps"]:
            shares = (f"{key} {np.ravel(row[key])[0]:.3f}" for key in list(row)[2:])
            time = f"{row['milliseconds'][0]:.3g} ms"
            print(f"  M={row['micro_batches']}: {time}, {', '.join(shares)}", flush=True)
    print(save("pipeline_bubble", result))


if __name__ == "__main__":
    main()
