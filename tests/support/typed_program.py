"""A user's program, for type checkers: they accept it, and refuse the lines that say so.

`make check` reads it with mypy, tests/test_typed_program.py with pyright, each at its strictest; an
`ignore` that hides no error is an error of both.
"""

from typing import Any, assert_type

import jax
import jax.numpy as jnp
import numpy as np
import optax  # pyright: ignore[reportMissingTypeStubs]

import replicax as rx

Net = dict[str, jax.Array]
Batch = dict[str, jax.Array]


class Slowest(rx.Hook):
    seconds = 0.0

    def record(self, run: rx.Run, record: Any) -> None:
        self.seconds = max(self.seconds, record.seconds)
        if run.is_main:
            run.say(f"{self.seconds} s to step {record.step} of {run.total}")

    def dispatched(self, run: rx.Run, step: Any) -> None:
        if run.place.step > 9:
            run.stop("enough")

    def end(self, run: int) -> None: ...  # type: ignore[override]  # pyright: ignore[reportIncompatibleMethodOverride]


class Lines(rx.hooks.Logger):
    def write(self, record: Any) -> None:
        print(record.kind)


def loss(model: Net, batch: Batch, key: Any) -> tuple[jax.Array, dict[str, jax.Array]]:
    errors = batch["x"] @ model["w"] - batch["y"]
    return errors**2, {"close": jnp.abs(errors) < 1}


def step(state: Net, batch: Batch, key: Any) -> tuple[Net, dict[str, Any]]:
    means, gradient = rx.value_and_grad(loss)(state, batch, key)
    return {"w": state["w"] - 0.1 * gradient["w"]}, means | {"mean": rx.mean(batch["y"])}


def placed(dp: rx.DataParallel, state: rx.TrainState) -> rx.TrainState:
    return dp.place(state)


optimizer = optax.sgd(0.1)
rows = {"x": np.ones((64, 3), np.float32), "y": np.ones(64, np.float32)}
model: Net = {"w": jax.random.normal(jax.random.key(0), (3,))}
dp = rx.DataParallel(loss, optimizer, mode="shard_map", layout="zero1", reduction="int8")
state = dp.init(model)
for batch in dp.feed(rows, batch_size=8):
    state, metrics = dp.step(state, batch)
    assert_type(metrics, dict[str, Any])
assert_type(state, rx.TrainState[Net])
assert_type(dp.model(state), Net)
dp.evaluate(state, rows, batch_size=8)["loss"]

hooks = [Slowest(), Lines(), rx.hooks.KeepBest(mode="min"), rx.hooks.CSV()]
result = rx.fit(
    dp,
    state,
    rows,
    batch_size=8,
    epochs=2,
    eval_source=rx.Evaluation(rows, every_steps=4),
    hooks=hooks,
    guard=rx.Guard(max_bad_steps=3),
    saving=rx.Saving(every=9),
    run_dir="runs/typed",
)
assert_type(result.state, rx.TrainState[Net])
assert_type(result.metrics["loss"], float)
assert_type(result.interrupted, bool)
assert_type(rx.load_model("runs/typed", model), Net)
assert_type(rx.load("runs/typed", dp=dp, state=state, step="best").model, Net)
placed(dp, result.state)

with rx.Run(dp, dp.init(model), rows, batch_size=8, steps=9, hooks=hooks[:2]) as run:
    for batch in run:
        run.step(batch)
    assert_type(dp.model(run.state), Net)

own = rx.DataParallel(step=step, mode=dp.mode, reduction="bfloat16")
assert_type(own.model(own.init(model)), Net)

try:
    rx.initialize()
except rx.errors.ConfigError as error:
    print(error)
except rx.ReplicaxError as error:
    print(error.exit_code)


def accepted() -> None:
    rx.DataParallel(loss, optimizer, layout=[("w", jax.sharding.PartitionSpec("model"))])
    rx.DataParallel(loss, optimizer, layout=rx.layout("fsdp", schedule="gpipe"))
    rx.DataParallel(loss, optimizer, reduction=rx.Coded("int4"), rounds=rx.Rounds(send="int4"))
    checked = rx.verify(dp, model, rows, batch_size=8, modes=["jit", dp.mode])
    assert_type(checked, rx.types.Verification)


def refused() -> None:
    rx.DataParallel(loss, optimizer, mode="jitt")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    rx.DataParallel(loss, optimizer, layout="ddp")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    rx.DataParallel(loss, optimizer, precision="bf16")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    rx.DataParallel(loss, optimizer, reduction="int5")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    rx.layout(schedule="gpip")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    rx.fit(dp, state, rows, epoch=2)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    rx.fit(dp, state, rows, epochs="2")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    rx.DataParalel(loss, optimizer)  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]
    dp.step(model, rows)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
