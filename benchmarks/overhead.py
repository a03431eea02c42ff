"""Overhead of `DataParallel.step` over a minimal hand-written JAX step.

1. LeNet at batch 256: the same model, optimizer and devices; the hand-written step has no mask,
   key or weights, and a plain mean.
2. The MLP in Flax Linen: the hand-written step uses its own loss, `network.apply` and the same
   Adam. The size is the small default, or with `--preset seed`, for a GPU, 379 million parameters.
3. A model of two parameters, which measures the host's work alone.

Goals: a median ratio of at most 1.02 for LeNet and 1.01 for the MLP, and at most 100 microseconds
over plain `jax.jit`.
"""

import argparse
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec
from timing import environment, interleaved, ratios, save, spread

import replicax as rx
from replicax.recipes.lenet import LeNet, logits
from replicax.train.run.host_memory import keep_freed_memory

BATCH = 256
STEPS_IN_A_ROUND = 4
OPTIMIZER = optax.sgd(0.1, momentum=0.9, nesterov=True)


def hand_written(mean_loss: Any, mesh: jax.sharding.Mesh, optimizer: Any = OPTIMIZER) -> Any:
    """Return a `jit` of the mean loss's gradient and the update, with donated state."""
    everywhere = NamedSharding(mesh, PartitionSpec())
    by_rows = NamedSharding(mesh, PartitionSpec("data"))

    @functools.partial(
        jax.jit,
        donate_argnums=(0, 1),
        in_shardings=(everywhere, everywhere, by_rows),
        out_shardings=everywhere,
    )
    def step(params: Any, opt_state: Any, batch: Any) -> Any:
        loss, gradient = jax.value_and_grad(mean_loss)(params, batch)
        updates, opt_state = optimizer.update(gradient, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    return step


def hand_written_shard_map(mean_loss: Any, mesh: jax.sharding.Mesh) -> Any:
    """Return a `shard_map` of the same on one replica's rows, with one pmean."""

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    @functools.partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(PartitionSpec(), PartitionSpec(), PartitionSpec("data")),
        out_specs=PartitionSpec(),
        check_vma=False,
    )
    def step(params: Any, opt_state: Any, batch: Any) -> Any:
        local = jax.value_and_grad(mean_loss)(params, batch)
        loss, gradient = jax.lax.pmean(local, "data")
        updates, opt_state = OPTIMIZER.update(gradient, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    return step


def steps_of(dp: rx.DataParallel, model: Any, batch: Any, count: int) -> Any:
    """Return a function that runs `count` steps with Replicax."""
    state = dp.init(model)

    def run() -> None:
        nonlocal state
        for _ in range(count):
            state, metrics = dp.step(state, batch)
        jax.block_until_ready(metrics)

    return run


def steps_by_hand(
    step: Any,
    mesh: jax.sharding.Mesh,
    model: Any,
    data: Any,
    count: int,
    optimizer: Any = OPTIMIZER,
) -> Any:
    """Return a function that runs `count` hand-written steps."""
    everywhere = NamedSharding(mesh, PartitionSpec())
    params = jax.device_put(jax.tree.map(jnp.copy, model), everywhere)
    opt_state = jax.device_put(optimizer.init(params), everywhere)

    def run() -> None:
        nonlocal params, opt_state
        for _ in range(count):
            params, opt_state, loss = step(params, opt_state, data)
        jax.block_until_ready(loss)

    return run


def lenet(devices: int, rounds: int) -> dict[str, Any]:
    """Measure milliseconds per step in each mode and by hand, and their ratios."""
    mesh = rx.make_mesh(devices=jax.devices()[:devices])
    recipe = LeNet()
    random = np.random.default_rng(0)
    data = {
        "image": random.integers(0, 256, (BATCH, 28, 28, 1)).astype(np.uint8),
        "label": random.integers(0, 10, BATCH).astype(np.int32),
    }
    model = recipe.model(jax.random.key(0))

    def mean_loss(params: Any, batch: Any) -> jax.Array:
        return jnp.mean(
            optax.softmax_cross_entropy_with_integer_labels(
                logits(params, batch["image"]), batch["label"]
            )
        )

    def loss(model: Any, batch: Any, key: Any) -> Any:
        return optax.softmax_cross_entropy_with_integer_labels(
            logits(model, batch["image"]), batch["label"]
        )

    (batch,) = rx.DataParallel(loss, OPTIMIZER, mesh=mesh).feed(data, BATCH)
    by_hand = {"jit": hand_written, "shard_map": hand_written_shard_map}
    runs = {}
    for mode, write in by_hand.items():
        dp = rx.DataParallel(loss, OPTIMIZER, mesh=mesh, mode=mode)
        runs[f"replicax {mode}"] = steps_of(dp, model, batch, STEPS_IN_A_ROUND)
        runs[f"by hand {mode}"] = steps_by_hand(
            write(mean_loss, mesh), mesh, model, batch.data, STEPS_IN_A_ROUND
        )
    return compared(interleaved(runs, rounds), STEPS_IN_A_ROUND, list(by_hand))


def mlp(devices: int, rounds: int, preset: str | None) -> dict[str, Any]:
    """Measure the same for the MLP in mode `jit`."""
    from replicax.recipes.mlp import MLP, Network  # gpu.py uses the rest without Flax

    mesh = rx.make_mesh(devices=jax.devices()[:devices])
    recipe = MLP(**MLP.presets[preset] if preset else {})
    recipe = dataclasses.replace(recipe, rows=recipe.batch_size)
    network, optimizer = Network(recipe.layers, recipe.hidden), recipe.optimizer()
    model = recipe.model(jax.random.key(0))

    def mean_loss(params: Any, batch: Any) -> jax.Array:
        return jnp.mean((network.apply(params, batch["x"]) - batch["y"]) ** 2)

    dp = rx.DataParallel(recipe.loss, optimizer, mesh=mesh)
    (batch,) = dp.feed(recipe.train_source(), recipe.batch_size)
    step = hand_written(mean_loss, mesh, optimizer)
    # Below 32: without a wait, several CPU devices deadlock at the 33rd step in flight.
    steps = STEPS_IN_A_ROUND if preset else 4 * STEPS_IN_A_ROUND
    runs = {
        "replicax jit": steps_of(dp, model, batch, steps),
        "by hand jit": steps_by_hand(step, mesh, model.variables, batch.data, steps, optimizer),
    }
    return compared(interleaved(runs, rounds), steps, ["jit"])


def compared(seconds: dict[str, list[float]], steps: int, modes: list[str]) -> dict[str, Any]:
    """Return milliseconds per step of each run, and the ratio of Replicax to by hand."""
    each = {name: spread([value / steps * 1e3 for value in seconds[name]]) for name in seconds}
    ratio = {
        mode: spread(ratios(seconds[f"replicax {mode}"], seconds[f"by hand {mode}"]))
        for mode in modes
    }
    return {
        "milliseconds_per_step": {k: [round(x, 3) for x in values] for k, values in each.items()},
        "ratio": {mode: [round(x, 4) for x in values] for mode, values in ratio.items()},
    }


def tiny(rounds: int) -> dict[str, Any]:
    """Measure microseconds per step of linear regression on one device."""
    mesh = rx.make_mesh(devices=jax.devices()[:1])
    data = {"x": np.ones(8, np.float32), "y": np.ones(8, np.float32)}
    model = {"weight": jnp.float32(0.5), "bias": jnp.float32(0.0)}

    def loss(model: Any, batch: Any, key: Any = None) -> Any:
        return (model["weight"] * batch["x"] + model["bias"] - batch["y"]) ** 2

    dp = rx.DataParallel(loss, OPTIMIZER, mesh=mesh)
    (batch,) = dp.feed(data, 8)
    step = hand_written(lambda params, batch: jnp.mean(loss(params, batch)), mesh)
    count = 200
    seconds = interleaved(
        {
            "replicax": steps_of(dp, model, batch, count),
            "by hand": steps_by_hand(step, mesh, model, batch.data, count),
        },
        rounds,
    )
    each = {
        name: [round(value / count * 1e6, 2) for value in spread(values)]
        for name, values in seconds.items()
    }
    over = [
        (a - b) / count * 1e6 for a, b in zip(seconds["replicax"], seconds["by hand"], strict=True)
    ]
    return {
        "microseconds_per_step": each,
        "over_plain_jit": [round(value, 2) for value in spread(over)],
    }


def show(name: str, found: dict[str, Any]) -> None:
    for run, (middle, low, high) in found["milliseconds_per_step"].items():
        print(f"{name}, {run:<20} {middle:8.2f} [{low:.2f}, {high:.2f}] ms")
    for mode, (middle, low, high) in found["ratio"].items():
        print(f"{name}, ratio {mode:<14} {middle:8.4f} [{low:.4f}, {high:.4f}]")


def show_tiny(found: dict[str, Any]) -> None:
    for run, (middle, low, high) in found["microseconds_per_step"].items():
        print(f"two parameters, {run:<22} {middle:8.1f} [{low:.1f}, {high:.1f}] us")
    middle, low, high = found["over_plain_jit"]
    print(f"two parameters, over plain jit       {middle:8.1f} [{low:.1f}, {high:.1f}] us")


def main() -> None:
    from replicax.recipes.mlp import MLP

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=100, help="interleaved rounds (default: 100)")
    parser.add_argument("--preset", choices=list(MLP.presets), help="MLP size; small by default")
    args = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", 2)
    # Otherwise page faults on either side, depending on the allocator, hide the difference.
    keep_freed_memory()
    result = {"environment": environment(), "batch": BATCH, "rounds": args.rounds}
    result["mlp"] = args.preset or "default"
    print("median [quartiles]")
    for devices in range(1, min(len(jax.devices()), 2) + 1):
        name = f"lenet on {devices} devices"
        result[name] = lenet(devices, args.rounds)
        show(name, result[name])
        name = f"mlp on {devices} devices"
        result[name] = mlp(devices, args.rounds, args.preset)
        show(name, result[name])
    result["tiny"] = tiny(args.rounds)
    show_tiny(result["tiny"])
    print(f"see {save('overhead', result)}")


if __name__ == "__main__":
    main()
