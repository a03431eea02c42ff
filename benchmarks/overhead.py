"""What `DataParallel.step` costs over the tightest step written by hand in JAX.

1. LeNet at batch 256: the same model, optimizer and devices; by hand there is no mask, no key, no
   weight, and the mean is a mean.
2. A model of two parameters, where the host's own work is all there is.

Aims: a median ratio of at most 1.02, and at most 100 microseconds over plain `jax.jit`.
"""

import argparse
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from timing import environment, interleaved, ratios, save, spread

import replicax as rx
from replicax.parallel.mesh import by_rows, replicated
from replicax.recipes.lenet import LeNet, logits
from replicax.train.host_memory import keep_freed_memory

BATCH = 256
OPTIMIZER = optax.sgd(0.1, momentum=0.9, nesterov=True)


def hand_written(mean_loss: Any, mesh: jax.sharding.Mesh) -> Any:
    """`jit` of the mean loss's gradient and the update, the state donated."""

    @functools.partial(
        jax.jit,
        donate_argnums=(0, 1),
        in_shardings=(replicated(mesh), replicated(mesh), by_rows(mesh)),
        out_shardings=replicated(mesh),
    )
    def step(params: Any, opt_state: Any, batch: Any) -> Any:
        loss, gradient = jax.value_and_grad(mean_loss)(params, batch)
        updates, opt_state = OPTIMIZER.update(gradient, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    return step


def hand_written_shard_map(mean_loss: Any, mesh: jax.sharding.Mesh) -> Any:
    """`shard_map` of the same on one replica's rows, with one pmean."""
    spec = jax.sharding.PartitionSpec

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    @functools.partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(spec(), spec(), spec("data")),
        out_specs=spec(),
        check_vma=False,
    )
    def step(params: Any, opt_state: Any, batch: Any) -> Any:
        local = jax.value_and_grad(mean_loss)(params, batch)
        loss, gradient = jax.lax.pmean(local, "data")
        updates, opt_state = OPTIMIZER.update(gradient, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    return step


def steps_of(dp: rx.DataParallel, model: Any, batch: Any, count: int) -> Any:
    """A function that takes `count` steps with Replicax."""
    state = dp.init(model)

    def run() -> None:
        nonlocal state
        for _ in range(count):
            state, metrics = dp.step(state, batch)
        jax.block_until_ready(metrics)

    return run


def steps_by_hand(step: Any, mesh: jax.sharding.Mesh, model: Any, data: Any, count: int) -> Any:
    """A function that takes `count` steps by hand."""
    params = jax.device_put(jax.tree.map(jnp.copy, model), replicated(mesh))
    opt_state = jax.device_put(OPTIMIZER.init(params), replicated(mesh))

    def run() -> None:
        nonlocal params, opt_state
        for _ in range(count):
            params, opt_state, loss = step(params, opt_state, data)
        jax.block_until_ready(loss)

    return run


def lenet(devices: int, rounds: int) -> dict[str, Any]:
    """Milliseconds a step in each mode and by hand, and their ratios."""
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
        runs[f"replicax {mode}"] = steps_of(dp, model, batch, 4)
        runs[f"by hand {mode}"] = steps_by_hand(write(mean_loss, mesh), mesh, model, batch.data, 4)
    seconds = interleaved(runs, rounds)
    result: dict[str, Any] = {
        "milliseconds_per_step": {
            name: [round(value / 4 * 1e3, 3) for value in spread(each)]
            for name, each in seconds.items()
        }
    }
    result["ratio"] = {
        mode: [
            round(value, 4)
            for value in spread(ratios(seconds[f"replicax {mode}"], seconds[f"by hand {mode}"]))
        ]
        for mode in by_hand
    }
    return result


def tiny(rounds: int) -> dict[str, Any]:
    """Microseconds a step of a line's fit on one device."""
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=100, help="interleaved rounds (default: 100)")
    rounds = parser.parse_args().rounds
    jax.config.update("jax_num_cpu_devices", 2)
    # Or page faults on either side, by luck of the allocator, hide what is to be seen.
    keep_freed_memory()
    result = {"environment": environment(), "batch": BATCH, "rounds": rounds}
    print("median [quartiles]")
    for devices in (1, 2):
        found = lenet(devices, rounds)
        result[f"lenet on {devices} devices"] = found
        for name, (middle, low, high) in found["milliseconds_per_step"].items():
            print(f"lenet, {devices} devices, {name:<20} {middle:8.2f} [{low:.2f}, {high:.2f}] ms")
        for mode, (middle, low, high) in found["ratio"].items():
            print(
                f"lenet, {devices} devices, ratio {mode:<14} {middle:8.4f} [{low:.4f}, {high:.4f}]"
            )
    found = tiny(rounds)
    result["tiny"] = found
    for name, (middle, low, high) in found["microseconds_per_step"].items():
        print(f"two parameters, {name:<22} {middle:8.1f} [{low:.1f}, {high:.1f}] us")
    middle, low, high = found["over_plain_jit"]
    print(f"two parameters, over plain jit       {middle:8.1f} [{low:.1f}, {high:.1f}] us")
    print(f"see {save('overhead', result)}")


if __name__ == "__main__":
    main()
