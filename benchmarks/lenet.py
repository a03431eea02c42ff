"""An epoch of LeNet on Fashion-MNIST, two CPU devices, batch 256: Replicax and its peers.

Compared with a hand-written pmap loop, and PyTorch eager, compiled, and as two DDP processes, with
interleaved epochs. Input is included: batches are shuffled and sliced from uint8 images on the
host. Goals: at least 2.5 times as fast as the pmap loop, and no slower than PyTorch's best.
"""

import argparse
import time
from typing import Any

import jax
import optax
from lenet_peers import (
    BATCH,
    DEVICES,
    LEARNING_RATE,
    MOMENTUM,
    pmap_by_hand,
    pytorch,
)
from timing import environment, ratios, save, spread
from torch_peer import torch_version

import replicax as rx
from replicax.recipes.datasets import fashion_mnist
from replicax.recipes.lenet import LeNet
from replicax.train.run.host_memory import keep_freed_memory


def replicax(mode: str, data: dict[str, Any]) -> Any:
    """Return an epoch with `feed` and `step`, as users write it; 96 rows more than the others."""
    recipe = LeNet()
    optimizer = optax.sgd(LEARNING_RATE, momentum=MOMENTUM)
    mesh = rx.make_mesh(devices=jax.devices()[:DEVICES])
    dp = rx.DataParallel(recipe.loss, optimizer, mesh=mesh, mode=mode)
    state = dp.init(recipe.model(jax.random.key(0)))

    def epoch(number: int) -> tuple[float, float]:
        nonlocal state
        started = time.perf_counter()
        losses = []
        for batch in dp.feed(data, BATCH, shuffle=True, epoch=number):
            state, metrics = dp.step(state, batch)
            losses.append(metrics["loss"])
        jax.block_until_ready(state)
        return time.perf_counter() - started, float(sum(map(float, losses)) / len(losses))

    epoch(0)
    return epoch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7, help="epochs of each (default: 7)")
    parser.add_argument(
        "--torch-python",
        default="python3",
        help="an interpreter with torch (default: python3); otherwise PyTorch is skipped",
    )
    args = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", DEVICES)
    keep_freed_memory()  # as in `replicax train`; the hand-written loop uses it too
    data = fashion_mnist()
    images, labels = data.train["image"], data.train["label"]
    print(f"data: {data.name}, {data.source}, {len(labels):,} rows")
    epochs = {f"replicax {mode}": replicax(mode, data.train) for mode in ("jit", "shard_map")}
    epochs["pmap by hand"] = pmap_by_hand(images, labels)
    version = torch_version(args.torch_python)
    if version:
        for how in ("eager", "compile", "ddp"):
            epochs[f"torch {how}"] = pytorch(images, labels, args.torch_python, how)
    else:
        print(f"{args.torch_python} has no torch: skipping PyTorch; see --torch-python")
    seconds: dict[str, list[float]] = {name: [] for name in epochs}
    loss: dict[str, float] = {}
    for number in range(1, args.rounds + 1):
        for name, epoch in epochs.items():
            elapsed, loss[name] = epoch(number)
            seconds[name].append(elapsed)
        print(f"round {number}: " + ", ".join(f"{k} {v[-1]:.2f} s" for k, v in seconds.items()))
    report(seconds, loss, len(labels), {**environment(), "torch": version, "data": data.name})


def report(
    seconds: dict[str, list[float]], loss: dict[str, float], rows: int, where: dict[str, Any]
) -> None:
    steps = rows // BATCH
    print("\nepoch                seconds [quartiles]    ms/step   replicax jit is faster by")
    table = {}
    for name, values in seconds.items():
        middle, low, high = spread(values)
        factor, *around = spread(ratios(values, seconds["replicax jit"]))
        table[name] = {
            "seconds": [round(value, 3) for value in values],
            "milliseconds_per_step": round(middle / steps * 1e3, 2),
            "replicax_jit_is_faster_by": [round(value, 3) for value in (factor, *around)],
            "loss_of_last_epoch": round(loss[name], 4),
        }
        print(
            f"{name:<18} {middle:>6.2f} [{low:>5.2f}, {high:>5.2f}]  {middle / steps * 1e3:>12.1f}"
            f"   {factor:.2f} [{around[0]:.2f}, {around[1]:.2f}]"
        )
    print(f"see {save('lenet', {'environment': where, 'batch': BATCH, 'epochs': table})}")


if __name__ == "__main__":
    main()
