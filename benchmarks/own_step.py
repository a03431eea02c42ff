"""Overhead of a GAN with a custom `step` over the same step written by hand for one device.

`examples/wgan_gp.py`, in its own size and larger: two networks, two optimizers, six gradients per
step. By hand, the primitive is `jax.value_and_grad` of a mean, with and without a step counter in
the state: on a CPU, that int32 alone may double the time of a 0.1 ms program. Goal: a median ratio
of at most 1.15.
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
from timing import environment, interleaved, ratios, save, spread

import replicax as rx

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

import wgan_gp

SIZES = {"16 wide, 32 rows": (16, 32, 400), "256 wide, 256 rows": (256, 256, 40)}
"""Width of the networks, rows per batch, and steps per round."""


def by_hand(loss: Any) -> Any:
    """Return the primitive for one device, in plain JAX."""

    def mean(model: Any, batch: Any, key: Any) -> Any:
        returned = loss(model, batch, key)
        values, metrics = returned if isinstance(returned, tuple) else (returned, {})
        means = {"loss": jnp.mean(values), **{n: jnp.mean(v) for n, v in metrics.items()}}
        return means["loss"], means

    def means_and_gradient(model: Any, batch: Any, key: Any) -> Any:
        (_, means), gradient = jax.value_and_grad(mean, has_aux=True)(model, batch, key)
        return means, gradient

    return means_and_gradient


def steps(step: Any, state: Any, batch: Any, count: int) -> Callable[[], None]:
    """Return a function that runs `count` steps."""

    def run() -> None:
        nonlocal state
        for _ in range(count):
            state, metrics = step(state, batch)
        jax.block_until_ready(metrics)

    return run


def measure(width: int, rows: int, count: int, rounds: int) -> dict[str, Any]:
    """Measure milliseconds per step by hand and in two modes, and their ratios."""
    wgan_gp.WIDTH, wgan_gp.ROWS = width, rows
    data = wgan_gp.rows()

    def plain(state: Any, batch: Any) -> Any:
        with mock.patch.object(rx, "value_and_grad", by_hand):
            return wgan_gp.step(state, batch, None)

    def counted(state: Any, batch: Any) -> Any:
        after, metrics = plain(state[1], batch)
        return (state[0] + 1, after), metrics

    begin = {plain: wgan_gp.state(), counted: (jnp.int32(0), wgan_gp.state())}
    runs = {
        name: steps(jax.jit(each, donate_argnums=0), begin[each], jax.device_put(data), count)
        for name, each in (("by hand", plain), ("counted", counted))
    }
    for mode in ("jit", "shard_map"):
        mesh = rx.make_mesh(devices=jax.devices()[:1])
        dp = rx.DataParallel(step=wgan_gp.step, mode=mode, mesh=mesh)
        (batch,) = dp.feed(data, rows)
        runs[mode] = steps(dp.step, dp.init(wgan_gp.state()), batch, count)
    seconds = interleaved(runs, rounds)
    return {
        "milliseconds": {
            name: spread([1e3 * each / count for each in times]) for name, times in seconds.items()
        },
        "ratios": {
            f"{mode} / {hand}": spread(ratios(seconds[mode], seconds[hand]))
            for hand in ("by hand", "counted")
            for mode in ("jit", "shard_map")
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=40)
    rounds = parser.parse_args().rounds
    result: dict[str, Any] = {"environment": environment(), "rounds": rounds}
    for name, (width, rows, count) in SIZES.items():
        result[name] = measure(width, rows, count, rounds)
        print(f"{name}: {result[name]}", flush=True)
    print(save("own_step", result))


if __name__ == "__main__":
    main()
