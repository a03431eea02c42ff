"""Count the files, functions and lines of Replicax that a command, a step or a run enters.

    python benchmarks/call_path.py plan lenet --target h100:8
    python benchmarks/call_path.py step

Counts the functions of Replicax that this process calls, including threads but not child processes,
and the lines of those functions. `step` traces a `jit` step and runs it once more; `run` opens a
run of four steps and ends it; `islands` is a step of two islands that is compiled already. Set
PYTHONPATH to use another checkout.
"""

import json
import sys
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import jax
import jax.numpy as jnp
import numpy as np
import optax
from support.entered import entered, files, lines
from support.island_networks import connected, places
from support.one_step import warm_step

import replicax as rx
from replicax.cluster.watchdog import Timeouts
from replicax.core.ground.job import Alone
from replicax.islands.group import Group

ROWS = {"x": np.ones((64, 8), np.float32), "y": np.ones(64, np.float32)}


def data_parallel(**settings: Any) -> rx.DataParallel:
    def loss(params: Any, batch: Any, key: Any) -> jax.Array:
        return jnp.mean((batch["x"] @ params["w"] - batch["y"]) ** 2)

    mesh = rx.make_mesh(1, devices=jax.devices()[:1])
    return rx.DataParallel(loss, optax.sgd(0.1), mesh=mesh, **settings)


def started(dp: rx.DataParallel) -> rx.TrainState:
    return dp.init({"w": np.zeros(8, np.float32)})


def run() -> None:
    dp = data_parallel()
    rx.fit(dp, started(dp), ROWS, batch_size=16, epochs=1, progress=False)


def at_once(calls: Iterable[Callable[[], Any]]) -> list[Any]:
    """Return what the calls return, each in a new thread: others are not watched."""
    with ThreadPoolExecutor() as threads:
        return [each.result() for each in [threads.submit(call) for call in calls]]


def step_of_islands() -> Callable[[], Any]:
    """Return a step of both islands, which are in this process."""
    groups = [Group(place, Timeouts()) for place in places(2)]
    connected(2, [group.network for group in groups])

    def prepared(group: Group) -> Callable[[], Any]:
        job: Any = Alone()
        job.peers = SimpleNamespace(
            count=2, exchange=lambda parts: group.exchange(parts)[0], compare=lambda *_: None
        )
        dp = data_parallel(job=job, micro_shards=2)
        group.enter({}, has_state=True)
        state, _ = dp.step(started(dp), ROWS)
        return lambda: jax.block_until_ready(dp.step(state, ROWS))

    steps = at_once([partial(prepared, group) for group in groups])
    return lambda: at_once(steps)


def command() -> None:
    from replicax.cli import main

    try:
        main(sys.argv[1:])
    except SystemExit as ended:
        print("exit code:", ended.code or 0)


def main() -> None:
    match sys.argv[1:]:
        case ["step"]:
            call = warm_step()
        case ["run"]:
            call = run
        case ["islands"]:
            call = step_of_islands()
        case _:
            call = command
    codes = entered(call)
    counts = {"files": len(files(codes)), "functions": len(codes), "lines": lines(codes)}
    print(json.dumps({"command": sys.argv[1:], **counts}))


if __name__ == "__main__":
    main()
