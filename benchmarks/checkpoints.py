"""Cost of a checkpoint on two CPU devices.

1. Stall: the time a save blocks the loop after a step, until the state is copied and the next step
   may use it; and the time of steps during the background write.
2. Verification: bytes per second at which a checkpoint is read and compared with its checksums.
3. Restore: from the folder to a state on the devices, excluding verification.
4. The same for states of 1,000 and 3,000 small arrays, replicated and sharded: what each array
   costs. Beside the stall, the time that a copy to the host takes alone.

Goals: a stall below 5 % of a step per 100 MB of state, and verification at 1 GB/s or more; with
3,000 small arrays, a stall of at most 0.2 s beyond the copy. Writes `results/checkpoints.json`.
"""

import argparse
import dataclasses
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from timing import environment, save, spread

DEVICES = 2
jax.config.update("jax_num_cpu_devices", DEVICES)

import replicax as rx  # noqa: E402
from replicax.core.ground.job import Alone  # noqa: E402
from replicax.recipes import transformer  # noqa: E402
from replicax.recipes.gpt2 import GPT2  # noqa: E402
from replicax.recipes.mlp import MLP  # noqa: E402
from replicax.train.checkpoints.arrays import abstract, array_entries, read  # noqa: E402
from replicax.train.checkpoints.manifest import Position, read_manifest  # noqa: E402
from replicax.train.checkpoints.saver import Saver  # noqa: E402
from replicax.train.checkpoints.store import Store, verify_checkpoint  # noqa: E402
from replicax.train.folder.saving import Saving  # noqa: E402
from replicax.train.guarded import guarded  # noqa: E402
from replicax.train.run.host_memory import keep_freed_memory  # noqa: E402


def gpt(**sizes: int) -> tuple[Any, Any, Any]:
    """Return the recipe, model and batch of a GPT-2 on bytes."""
    recipe, draw = dataclasses.replace(GPT2(), **sizes), np.random.default_rng(0)
    shape = transformer.Shape(recipe.layers, recipe.heads, recipe.width, recipe.context, 257)
    rows, context = recipe.batch_size, recipe.context
    batch = {
        "tokens": draw.integers(0, 256, (rows, context + 1)).astype(np.uint16),
        "length": np.full(rows, context, np.int32),
        "bytes": np.full(rows, context, np.int32),
    }
    return recipe, transformer.init(shape, jax.random.key(0)), batch


def mlp(**sizes: int) -> tuple[Any, Any, Any]:
    """Return the recipe, model and batch of an MLP, whose step is short for its state size."""
    recipe, draw = dataclasses.replace(MLP(), **sizes), np.random.default_rng(0)
    source = recipe.train_source()
    rows = draw.permutation(recipe.rows)[: recipe.batch_size]
    return recipe, recipe.model(jax.random.key(0)), jax.tree.map(lambda leaf: leaf[rows], source)


SUBJECTS = {
    "gpt2, 6 layers of width 384": lambda: gpt(
        layers=6, heads=6, width=384, context=256, batch_size=8
    ),
    "gpt2, 8 layers of width 768": lambda: gpt(
        layers=8, heads=12, width=768, context=256, batch_size=8
    ),
    "mlp, 8 layers of width 1024, batch 256": lambda: mlp(
        layers=8, hidden=1024, inputs=1024, batch_size=256, rows=256
    ),
}


def measured(make: Any, rounds: int, folder: Path) -> dict[str, Any]:
    """Measure steps with and without a save, the background write, and read rates."""
    recipe, model, data = make()
    plain = rx.DataParallel(recipe.loss, recipe.optimizer())
    state = plain.init(model)
    dp = guarded(plain, state)
    (batch,) = plain.feed(data, recipe.batch_size)
    store = Store(folder / "checkpoints", 1, None)
    saver = Saver(store, 1, lambda: None, Alone(), 0, {})
    seconds: dict[str, list[float]] = {"step": [], "save": [], "step meanwhile": []}
    background, number = [], 0

    def step() -> None:
        nonlocal state, number
        state, metrics = dp.step(state, batch)
        jax.block_until_ready((state, metrics))
        number += 1

    for turn in range(rounds + 2):
        begun = time.perf_counter()
        step()
        alone = time.perf_counter()
        saver.save(state, Position(number, 0, 0, 0, 0, 0, 0, 0), {})
        copied = time.perf_counter()
        step()
        after = time.perf_counter()
        assert saver.wait(), saver.poll()
        written = time.perf_counter()
        if turn >= 2:
            seconds["step"].append(alone - begun)
            seconds["save"].append(copied - alone)
            seconds["step meanwhile"].append(after - copied)
            background.append(written - copied)
    return {
        **costs(seconds, array_bytes(state)),
        "seconds_until_written": spread(background),
        **readings(state, store, rounds),
    }


MANY = [(leaves, layout) for leaves in (1000, 3000) for layout in ("replicated", "fsdp")]


def many(leaves: int, layout: str, rounds: int, folder: Path) -> dict[str, Any]:
    """Measure saves of a state of so many small arrays: parameters, and Adam's two of each."""
    draw = np.random.default_rng(0)
    model = {
        f"layer{n}": {"kernel": draw.normal(size=(64, 8 * (n % 8 + 1))).astype(np.float32)}
        for n in range(leaves // 3)
    }
    dp = rx.DataParallel(lambda model, batch, key: batch["x"], optax.adam(1e-3), layout=layout)
    state = dp.init(model)
    store = Store(folder / "checkpoints", 1, None)
    saver = Saver(store, 1, lambda: None, Alone(), 0, {})
    seconds: dict[str, list[float]] = {"copy": [], "save": [], "written": [], "processor": []}
    for number in range(rounds + 1):
        # Arrays of their own, as JAX keeps copies on the host.
        first, second = (jax.block_until_ready(jax.tree.map(jnp.copy, state)) for _ in range(2))
        begun = time.perf_counter()
        jax.device_get(first)
        copied = time.perf_counter()
        saver.save(second, Position(number, 0, 0, 0, 0, 0, 0, 0), {})
        saved, processor = time.perf_counter(), time.process_time()
        assert saver.wait(), saver.poll()
        seconds["copy"].append(copied - begun)
        seconds["save"].append(saved - copied)
        seconds["written"].append(time.perf_counter() - saved)
        seconds["processor"].append(time.process_time() - processor)
    return {
        "arrays": len(jax.tree.leaves(state)),
        "state_bytes": array_bytes(state),
        "seconds_to_copy_to_the_host": spread(seconds["copy"][1:]),
        "seconds_of_the_first_stall": seconds["save"][0],
        "seconds_of_a_stall": spread(seconds["save"][1:]),
        "seconds_until_written": spread(seconds["written"][1:]),
        "processor_seconds_until_written": spread(seconds["processor"][1:]),
        **readings(state, store, rounds),
    }


def array_bytes(state: rx.TrainState) -> int:
    """Return the bytes of the state's arrays."""
    return sum(entry.nbytes for entry in array_entries(state).values())


def costs(seconds: dict[str, list[float]], size: int) -> dict[str, Any]:
    """Return the stall in all its units."""
    step = statistics.median(seconds["step"])
    stall, hundreds = statistics.median(seconds["save"]), size / 1e8
    interval = Saving().clock_seconds
    assert interval is not None
    return {
        "state_bytes": size,
        "milliseconds": {name: spread([1e3 * v for v in vs]) for name, vs in seconds.items()},
        "stall_milliseconds_per_100_MB": 1e3 * stall / hundreds,
        "stall_percent_of_the_step_per_100_MB": 100 * stall / step / hundreds,
        "stall_percent_of_all_steps_at_the_default_interval": 100 * stall / interval,
    }


def readings(state: rx.TrainState, store: Store, rounds: int) -> dict[str, Any]:
    """Measure verification and restore of the newest checkpoint."""
    _, path = store.paths()[-1]
    like, verified, restored = abstract(state), [], []
    verifying: list[float] = []
    for _ in range(max(rounds // 2, 3)):
        begun = time.perf_counter()
        manifest = read_manifest(path)
        verify_checkpoint(path, manifest)
        checked = time.perf_counter()
        jax.block_until_ready(read(like, path))
        restored.append(time.perf_counter() - checked)
        size = sum(file.bytes for file in manifest.files.values())
        verifying.append(checked - begun)
        verified.append(size / (checked - begun) / 1e9)
    return {
        "seconds_to_verify": spread(verifying),
        "verified_gigabytes_per_second": spread(verified),
        "seconds_to_restore": spread(restored),
    }


def main() -> None:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15, help="saves per subject")
    args = parser.parse_args()
    keep_freed_memory()
    results = {}
    for name, make in SUBJECTS.items():
        with tempfile.TemporaryDirectory() as folder:
            found = results[name] = measured(make, args.rounds, Path(folder))
        print(
            f"{name}: {found['state_bytes'] / 1e6:,.0f} MB, "
            f"step {found['milliseconds']['step'][0]:,.1f} ms, "
            f"stall {found['milliseconds']['save'][0]:,.1f} ms: "
            f"{found['stall_percent_of_the_step_per_100_MB']:.2f}% per 100 MB; verified at "
            f"{found['verified_gigabytes_per_second'][0]:.2f} GB/s",
            flush=True,
        )
    of_many = {}
    for leaves, layout in MANY:
        with tempfile.TemporaryDirectory() as folder:
            found = of_many[f"{leaves} arrays, {layout}"] = many(
                leaves, layout, args.rounds, Path(folder)
            )
        print(
            f"{found['arrays']:,} arrays, {layout}: stall {found['seconds_of_a_stall'][0]:.3f} s "
            f"(first {found['seconds_of_the_first_stall']:.3f}, copy "
            f"{found['seconds_to_copy_to_the_host'][0]:.3f}); written in "
            f"{found['seconds_until_written'][0]:.2f} s, "
            f"{found['processor_seconds_until_written'][0]:.2f} of a core; verified in "
            f"{found['seconds_to_verify'][0]:.3f} s, restored in "
            f"{found['seconds_to_restore'][0]:.2f} s",
            flush=True,
        )
    everything = {"subjects": results, "many_arrays": of_many, "environment": environment()}
    path = save("checkpoints", everything)
    print(f"written to {path}")


if __name__ == "__main__":
    main()
