"""The programs in `examples/`: their first losses here and in plain JAX, and their lines."""

import inspect
import re
import runpy
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import jax
import numpy as np
from flax import nnx
from support.plain_steps import (
    PLAIN_STEPS,
    custom_step,
    first_rows,
    mean_of_rows,
    other_rows_of,
    plain_forms,
    with_plain_sets,
)

import replicax as rx

FOLDER = Path(__file__).resolve().parents[2] / "examples"
NAMES = sorted(path.stem for path in FOLDER.glob("*.py"))
TRAINABLE = {"lora": nnx.LoRAParam, "frozen_backbone": "head"}
RANDOM = {"vae"}
"""Examples whose random draws depend on the batch's shape, and on the replica."""
NUMBERED = {*RANDOM, "diffusion"}
"""Examples whose loss depends on the number of the step."""
WHOLE = {*RANDOM, "equinox_state"}
"""Compared in mode `jit` alone, in batches without padding, which BatchNorm would average too."""
Metrics = dict[str, float]
FURTHER = {"diffusion", "dp_sgd", "dqn", "grpo", "lbfgs", "pinn", "tbptt", "vqvae"}
"""Tested in mode `exact`, with two micro-batches, and in a run that is stopped and resumed, too."""
NOT_RESUMED = {"dqn"}
"""A run reads batches ahead, and this example's next batch depends on the step before."""
TERMS = {"grpo": 1.0}
"""Size of the terms of a loss that nearly cancel, as advantages within a group do."""
STEPS = 5
STOP = 2
"""The step, in the middle of an epoch, after which a run that is resumed was stopped."""
EPOCHS = 2
EXACT = [("exact", 4), ("exact", 1), ("exact", 2)]
IN_PARTS = [("shard_map", 4), ("jit", 2), ("pmap", 2), ("exact", 2), ("jit", 1)]
RESUMED = [("shard_map", (4, 2)), ("jit", (2, 4)), ("pmap", (1, 2)), ("exact", (4, 1))]
CASES = [(mode, devices) for mode in ("jit", "shard_map", "pmap") for devices in (1, 2, 4)]


def load(name: str) -> Any:
    return SimpleNamespace(**runpy.run_path(str(FOLDER / f"{name}.py")))


def cases(name: str) -> list[tuple[str, int]]:
    """Modes and devices where plain JAX's numbers are expected."""
    return [(mode, devices) for mode, devices in CASES if name not in WHOLE or mode == "jit"]


def sources(example: Any) -> dict[str, Any]:
    """All that the example gives to `dp.feed`; each has the rows of `example.rows()`."""
    if own_batches(example):
        return {"own": None}
    return example.sources() if hasattr(example, "sources") else {"arrays": example.rows()}


def batch_size(name: str, example: Any) -> int:
    return 28 if name in WHOLE else getattr(example, "BATCH", 32)


def orders(name: str, example: Any) -> Iterator[np.ndarray]:
    """Yield the rows of each batch, in order; every third batch of 32 has 20."""
    count, size = len(jax.tree.leaves(example.rows())[0]), batch_size(name, example)
    assert name in WHOLE or count % size == 20
    for _ in range(EPOCHS):
        yield from np.split(np.arange(count), range(size, count, size))


def has_own_step(example: Any) -> bool:
    return hasattr(example, "step")


class Drawn:
    """Batches that the example's replay draws, by the errors in the step before."""

    def __init__(self, example: Any) -> None:
        self.replay, self.sizes = example.Replay(example.rows()), (32, 32, 20, 32, 32)

    def __iter__(self) -> Iterator[Any]:
        for number, size in enumerate(self.sizes):
            self.index, batch = self.replay.draw(size, number)
            yield batch

    def learn(self, metrics: Any) -> None:
        self.replay.learn(self.index, metrics["error"].whole())


class Points:
    """Batches of two sets of points; the third has fewer of each."""

    def __init__(self, example: Any) -> None:
        self.points = example.points
        self.sizes = ((24, 10), (24, 10), (13, 7), (24, 10), (24, 10))

    def __iter__(self) -> Iterator[Any]:
        for number, sizes in enumerate(self.sizes):
            yield self.points(number, *sizes)

    def learn(self, metrics: Any) -> None:
        pass


def own_batches(example: Any) -> Any:
    """Return the batches of an example that makes them itself, else None."""
    if hasattr(example, "Replay"):
        return Drawn(example)
    return Points(example) if hasattr(example, "points") else None


def by_hand(name: str, example: Any, order: list[np.ndarray] | None = None) -> list[Metrics]:
    """Return the losses of plain JAX on one device; for a custom step all metrics."""
    batches = own_batches(example) or list(in_order(name, example, order))

    if has_own_step(example):

        def on_one_device(state: Any, batch: Any, number: Any) -> Any:
            rows = len(jax.tree.leaves(batch)[0])
            with mock.patch.dict(example.step.__globals__, rx=plain_forms(number)):
                after, metrics = example.step(first_rows(state, rows), batch, None)
            return other_rows_of(state, after), metrics

        found = []
        plain = map(with_plain_sets, batches)
        for metrics in custom_step(on_one_device, example.state(), plain):
            found.append(told(metrics))
            if hasattr(batches, "learn"):
                batches.learn(metrics)
        return found

    def numbered(params: Any, batch: Any, key: Any, number: Any) -> Any:
        with mock.patch.object(rx, "step_number", return_value=number):
            return example.loss(params, batch, jax.random.fold_in(key, 0))  # of micro-batch 0

    loss = numbered if name in NUMBERED else example.loss
    plain = PLAIN_STEPS.get(name, mean_of_rows)
    losses = plain(loss, example.optimizer(), example.model(), batches)
    return [{"loss": float(value)} for value in losses]


def in_order(name: str, example: Any, order: list[np.ndarray] | None) -> Iterator[Any]:
    """Yield the first batches, with the rows of `order`."""
    rows = example.rows()
    for part in (order or list(orders(name, example)))[:STEPS]:
        yield jax.tree.map(lambda leaf, part=part: leaf[part], rows)


def told(metrics: Any) -> Metrics:
    return {
        name: float(value) for name, value in metrics.items() if not isinstance(value, rx.ByRow)
    }


def data_parallel(
    name: str, example: Any, mode: str, devices: int, **settings: Any
) -> tuple[rx.DataParallel, rx.TrainState]:
    """Return the example's training in `mode` on so many devices, and its first state."""
    settings |= {"mesh": rx.make_mesh(devices=jax.devices()[:devices]), "mode": mode}
    if has_own_step(example):
        dp = rx.DataParallel(step=example.step, **settings)
        return dp, dp.init(example.state())
    trainable = TRAINABLE.get(name)
    dp = rx.DataParallel(example.loss, example.optimizer(), trainable=trainable, **settings)
    return dp, dp.init(example.model())


def with_replicax(
    name: str,
    example: Any,
    source: Any,
    mode: str,
    devices: int,
    *,
    shuffle: bool = False,
    **settings: Any,
) -> tuple[list[Metrics], list[np.ndarray]]:
    """Return the metrics in `mode` on so many devices, and the rows of each batch."""
    dp, state = data_parallel(name, example, mode, devices, **settings)
    found, order = [], []
    if own := own_batches(example):
        for batch in own:
            state, metrics = dp.step(state, batch)
            found.append(told(metrics))
            own.learn(metrics)
        return found, order
    for epoch in range(EPOCHS):
        for batch in dp.feed(source, batch_size(name, example), shuffle=shuffle, epoch=epoch):
            state, metrics = dp.step(state, batch)
            found.append(told(metrics))
            order.append(np.asarray(batch.index)[: batch.rows])
    return found[:STEPS], order[:STEPS]


def further(name: str, example: Any, folder: Path) -> Iterator[list[Metrics]]:
    """Yield the metrics in mode `exact`, with micro-batches, and of runs that were resumed."""
    *_, source = sources(example).values()
    for case in EXACT:
        yield with_replicax(name, example, source, *case)[0]
    for case in IN_PARTS:
        yield with_replicax(name, example, source, *case, accumulate=2)[0]
    for mode, devices in () if name in NOT_RESUMED else RESUMED:
        yield resumed(name, example, folder / mode, mode, devices)


def resumed(
    name: str, example: Any, folder: Path, mode: str, devices: tuple[int, int], **settings: Any
) -> list[Metrics]:
    """Return the metrics of a run that stops after step `STOP`, and goes on elsewhere."""
    found = []
    for last, count in zip((STOP, STEPS), devices, strict=True):
        dp, state = data_parallel(name, example, mode, count, **settings)
        own = own_batches(example)
        source, size = own or example.rows(), None if own else batch_size(name, example)
        with rx.Run(
            dp,
            state,
            source,
            batch_size=size,
            steps=STEPS,
            shuffle=False,
            run_dir=folder,
            progress=False,
            accept_changes=True,
        ) as run:
            for batch in run:
                found.append(told(run.step(batch)))
                if run.place.step == last:
                    break
    return found


def largest_difference(name: str, found: list[Metrics], expected: list[Metrics]) -> float:
    """Return the largest difference between losses, relative to the loss or its terms."""
    mine, theirs = (np.asarray([each["loss"] for each in losses]) for losses in (found, expected))
    return float(np.max(np.abs(mine - theirs) / np.maximum(np.abs(theirs), TERMS.get(name, 0.0))))


def plain_lines(name: str) -> int:
    """Lines of the step, its update and the loop over batches, in plain JAX."""
    own = lines_of_own_step(name)
    text = inspect.getsource(custom_step if own else PLAIN_STEPS.get(name, mean_of_rows))
    body = [line.strip() for line in text.splitlines()[1:]]
    return own + len([line for line in body if line and not line.startswith("yield")])


def lines_of_own_step(name: str) -> int:
    """Count the lines of the example's custom step; 0 without one."""
    text = (FOLDER / f"{name}.py").read_text(encoding="utf-8")
    steps = re.findall(r"^def step\(.*\n(?:(?: .*)?\n)*", text, re.MULTILINE)
    return sum(bool(line.strip()) for step in steps for line in step.splitlines())


def changed_lines(name: str) -> int:
    """Count the lines that use Replicax: the others are those of a program in plain JAX."""
    text = (FOLDER / f"{name}.py").read_text(encoding="utf-8")
    code = text[text.index("import replicax as rx") :]
    return len([line for line in code.splitlines() if re.search(r"\b(?:rx|dp|run)\b", line)])


def lines_here(name: str) -> int:
    """Lines of the same in the example."""
    said = r"rx\.DataParallel\(|dp\.init\(|in dp\.feed\(|dp\.step\(|rx\.fit\("
    said += r"|rx\.Run\(|in run:|run\.step\(|for number in"
    text = (FOLDER / f"{name}.py").read_text(encoding="utf-8")
    main = text[text.index("def main()") :]
    return lines_of_own_step(name) + len(
        [line for line in main.splitlines() if re.search(said, line)]
    )
