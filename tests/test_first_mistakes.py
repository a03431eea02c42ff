"""The first calls of a new user that go wrong are refused with the next line to write."""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from support.mistakes import ADAM, MODEL, ROWS, loss, make, refused
from support.public_names import PUBLIC

import replicax as rx
from replicax.errors import ConfigError, DataError, StateError

KEY, LINEAR = jax.random.key(0), nnx.Linear(3, 1, rngs=nnx.Rngs(0))
XY = ROWS["x"], np.ones(8, np.float32)

CONFIG: dict[str, tuple[Callable[[Any, Any], Any], str]] = {
    "fit(state, dp)": (lambda dp, state: fit(state, dp), "DataParallel(loss, optimizer)"),
    "fit(dp, source)": (
        lambda dp, state: rx.fit(dp, ROWS, epochs=1),
        "fit(dp, state, source)",
    ),
    "fit(x, y)": (lambda dp, state: rx.fit(dp, state, *XY, epochs=1), "one dict"),
    "fit(feed)": (lambda dp, state: fit(dp, state, dp.feed(ROWS, 8)), "Feed"),
    "guard=5": (lambda dp, state: fit(dp, state, guard=5), "rx.Guard(max_bad_steps="),
    "a class as hook": (
        lambda dp, state: fit(dp, state, hooks=[rx.hooks.EarlyStopping]),
        "Stopping()",
    ),
    "step(state)": (lambda dp, state: dp.step(state), "dp.step(state, batch)"),
    "step(x, y)": (lambda dp, state: dp.step(state, *XY), "(TrainState, ndarray, ndarray)"),
    "step(key)": (lambda dp, state: dp.step(state, ROWS, KEY), "dp.step(state, batch)"),
    "init()": (lambda dp, state: dp.init(), "dp.init(model)"),
    "init(class)": (lambda dp, state: dp.init(nnx.Linear), "Linear"),
    "init(key)": (lambda dp, state: dp.init(KEY), "0 trainable"),
    "init(model, key)": (lambda dp, state: dp.init(MODEL, KEY), "dp.init(model)"),
    "init(seed=key)": (lambda dp, state: dp.init(MODEL, seed=KEY), "PRNGKeyArray"),
    "a tree as loss": (lambda dp, state: make(MODEL), "state = dp.init(model)"),
    "a module as loss": (lambda dp, state: make(LINEAR), "dp.init(model)"),
    "Linen as loss": (lambda dp, state: make(nn.Dense(1)), "dp.init(model)"),
    "model, loss, optimizer": (
        lambda dp, state: rx.DataParallel(MODEL, loss, ADAM),  # type: ignore[misc, arg-type]
        "DataParallel(loss, optimizer)",
    ),
    "devices as mesh": (lambda dp, state: make(mesh=jax.devices()), "rx.make_mesh("),
    "make_mesh(devices=2)": (lambda dp, state: rx.make_mesh(devices=2), "jax.devices()[:"),  # type: ignore[arg-type]
    "mode='fsdp'": (lambda dp, state: make(mode="fsdp"), "layout='fsdp'"),
    "mode='ddp'": (lambda dp, state: make(mode="ddp"), "layout='replicated'"),
    "precision=16": (lambda dp, state: make(precision=16), "'float16'"),
    "precision=jnp.bfloat16": (lambda dp, state: make(precision=jnp.bfloat16), "'bfloat16'"),
    "verify(state)": (lambda dp, state: rx.verify(dp, state, ROWS), "dp.model(state)"),
    "plan(state)": (
        lambda dp, state: rx.plan(dp, state, ROWS, target="h100:8", by_formula=True),
        "dp.model(state)",
    ),
    "bench(state)": (
        lambda dp, state: rx.bench(dp, state, ROWS, batch_size=8, progress=False),
        "dp.model(state)",
    ),
    "load(state=model)": (
        lambda dp, state: rx.load("runs/none", dp=dp, state=MODEL),  # type: ignore[arg-type]
        "dp.init(model)",
    ),
    "jax.value_and_grad": (
        lambda dp, state: rx.value_and_grad(loss)(MODEL),
        "(model, batch, key)",
    ),
    "layout='ddp'": (lambda dp, state: make(layout="ddp"), "'replicated'"),
    "precision='bf16-mixed'": (lambda dp, state: make(precision="bf16-mixed"), "'bfloat16'"),
    "feed(x, y)": (lambda dp, state: dp.feed(*XY), "one dict"),
    "feed(x, y, 8)": (lambda dp, state: dp.feed(*XY, 8), "one dict"),
    "feed(path)": (lambda dp, state: dp.feed("rows.npz", 8), "str"),
    "feed(rows)": (lambda dp, state: dp.feed(ROWS), "batch_size="),
    "evaluate(feed, 8)": (lambda dp, state: evaluate(dp, state, dp.feed(ROWS, 8)), "Feed"),
    "predict(state, batches)": (lambda dp, state: dp.predict(state, [ROWS]), "source, function)"),
    "predict(state, function, batches)": (
        lambda dp, state: dp.predict(state, loss, [ROWS]),
        "dp.predict(state, source, function)",
    ),
    "value_and_grad(model)": (lambda dp, state: rx.value_and_grad(MODEL), "callable"),  # type: ignore[arg-type]
}
STATE: dict[str, tuple[Callable[[Any, Any], Any], str]] = {
    "fit(dp, model)": (lambda dp, state: fit(dp, MODEL), "state = dp.init(model)"),
    "fit(dp, module)": (lambda dp, state: fit(dp, LINEAR), "Linear"),
    "fit(dp, pair)": (
        lambda dp, state: fit(dp, dp.step(state, ROWS)),
        "state, metrics = dp.step(state, batch)",
    ),
    "run that is not entered": (
        lambda dp, state: rx.Run(dp, state, ROWS, batch_size=8, epochs=1).step(ROWS),  # type: ignore[arg-type]
        "with rx.Run(",
    ),
    "step before init": (lambda dp, state: make().step(MODEL, ROWS), "state = dp.init(model)"),
    "end_round(model)": (lambda dp, state: dp.end_round(MODEL), "state = dp.init(model)"),
    "step(module)": (lambda dp, state: dp.step(LINEAR, ROWS), "state = dp.init(model)"),
    "step(batch, state)": (lambda dp, state: dp.step(ROWS, state), "dp.step(state, batch)"),
    "step(fit)": (lambda dp, state: dp.step(fit(dp, state), ROWS), ".state"),
    "state not kept": (
        lambda dp, state: [dp.step(state, ROWS) for _ in range(2)],
        "state, metrics = dp.step(state, batch)",
    ),
    "evaluate(feed, state)": (lambda dp, state: dp.evaluate(dp.feed(ROWS, 8), state), "Feed"),
    "predict(function, state)": (lambda dp, state: dp.predict(loss, state, [ROWS]), "a function"),
    "evaluate(model, ema)": (lambda dp, state: dp.evaluate(MODEL, [ROWS], ema=True), "dict"),
}
DATA: dict[str, tuple[Callable[[Any, Any], Any], str]] = {
    "step(feed)": (lambda dp, state: dp.step(state, dp.feed(ROWS, 8)), "a Feed"),
    "step(path)": (lambda dp, state: dp.step(state, "rows.npz"), "a str"),
}
CASES: dict[str, Any] = {
    name: (kind, *case)
    for kind, cases in ((ConfigError, CONFIG), (StateError, STATE), (DataError, DATA))
    for name, case in cases.items()
}


def fit(dp: Any, state: Any, source: Any = ROWS, **more: Any) -> Any:
    return rx.fit(dp, state, source, batch_size=8, epochs=1, progress=False, **more)


def evaluate(dp: Any, state: Any, source: Any) -> Any:
    return dp.evaluate(state, source, batch_size=8)


@pytest.mark.promise("home.first-mistakes")
@pytest.mark.parametrize("name", CASES)
def test_a_first_mistake_is_refused_with_the_next_line(name: str) -> None:
    kind, call, words = CASES[name]
    dp = make()
    state = dp.init(MODEL)
    refused(kind, lambda: call(dp, state), words)


RESULTS = {"Bench", "Fit", "Loaded", "Plan", "Verification"}
OF_OTHERS = {
    "DataParallel": {
        "lr=0.1": "optimizer=optax.adam(0.1)",
        "devices=4": "mesh=rx.make_mesh(4)",
        "grad_accum=2": "accumulate=2",
        "num_microbatches=2": "accumulate=2",
        "sharding='fsdp'": "layout='fsdp'",
        "strategy='ddp'": "layout='replicated'",
        "mixed_precision='bf16'": "precision='bfloat16'",
        "batch_size=8": "dp.feed(source, batch_size=8)",
        "seed=1": "dp.init(model, seed=1)",
        "model=1": "state = dp.init(model)",
        "accumulat=2": "accumulate=",
    },
    "fit": {
        "num_epochs=3": "epochs=3",
        "max_steps=3": "steps=3",
        "callbacks=[]": "hooks=[...]",
        "validation_data=[]": "eval_source=...",
        "model=1": "state=dp.init(model)",
        "save_steps=9": "saving=rx.Saving(every=9)",
        "checkpoint_every=5": "saving=rx.Saving(every=5)",
        "logger='wandb'": "hooks=[rx.hooks.WandB",
        "loggers=['csv', 'mlflow']": "hooks=[rx.hooks.CSV(), rx.hooks.MLflow",
        "val_dataloaders=[]": "eval_source=...",
        "resume_from_checkpoint='x'": "run_dir=",
        "lr=0.1": "DataParallel(loss, optimizer=optax.adam(0.1))",
        "devices=4": "DataParallel(loss, optimizer, mesh=rx.make_mesh(4))",
        "epoch=3": "epochs=",
        "max_epochs=3": "epochs=3",
        "num_train_epochs=3": "epochs=3",
        "learning_rate=0.1": "optimizer=optax.adam(0.1)",
        "y=1": "source={'x': x, 'y': y}",
        "train_data=1": "source=1",
        "metrics=[]": "{'name': rows}",
        "precision='bf16-mixed'": "precision='bfloat16'",
        "strategy='ddp'": "layout='replicated'",
    },
    "Run": {"num_epochs=3": "epochs=3"},
    "dp.feed": {"epochs=3": "rx.fit(dp, state, source, epochs=3)", "num_workers=4": "prefetch=4"},
    "dp.evaluate": {"batches=8": "source=8", "metrics=[]": "{'name': rows}"},
    "dp.predict": {"x=8": "source={'x': x, 'y': y}", "fn=8": "function=8"},
    "value_and_grad": {"has_aux=True": "{'name': rows}"},
    "EarlyStopping": {"monitor='loss'": "metric='loss'", "patience_count=1": "patience="},
    "Saving": {"save_interval_steps=9": "every=9", "max_to_keep=2": "keep=2"},
    "Guard": {"most=3": "max_bad_steps=3", "spikes=True": "skip_spikes=True"},
    "Evaluation": {"rows=3": "max_rows=3", "eval_steps=3": "every_steps=3"},
    "KeepBest": {"monitor='loss'": "metric='loss'"},
    "TensorBoard": {"log_dir='x'": "folder='x'"},
    "make_mesh": {"num_devices=4": "data=4", "tp=2": "model=2"},
    "plan": {"hardware='h100:8'": "target='h100:8'", "batch=3": "source=3"},
    "verify": {"mode='jit'": "modes="},
    "bench": {"optimizer=1": "DataParallel(loss, optimizer=1)", "num_devices=2": "devices=2"},
    "load": {"path='runs/x'": "run_dir='runs/x'"},
    "initialize": {"num_processes=4": "processes=4"},
}


MADE = {"Batch", "Job", "Mode", "Reduction", "TrainState", "GradientNorm", "DeviceMemory"}
"""Protocols, what a user does not make, and hooks that take no arguments at all."""
OPEN = {"Feed", "Hook", "Logger", "HostMetric", "Merged", "WandB", "Trackio", "Comet"}
"""Returned, to inherit from, or with arguments of any name, which are those of others."""
CALLS = [
    name
    for name, value in PUBLIC.items()
    if name not in MADE | OPEN | RESULTS
    if not (isinstance(value, type) and issubclass(value, BaseException))
]
METHODS = ("init", "feed", "step", "steps", "evaluate", "predict", "model", "place", "end_round")


@pytest.mark.parametrize("name", [*CALLS, *(f"dp.{name}" for name in METHODS)])
def test_an_argument_that_is_not_there_is_refused_by_name(name: str) -> None:
    found: Any = getattr(make(), name[3:]) if name.startswith("dp.") else PUBLIC[name]
    said = refused(ConfigError, lambda: found(no_such_argument=1), "no_such_argument=1")
    assert said.startswith(f"{name} ")


@pytest.mark.promise("home.first-mistakes")
@pytest.mark.parametrize("function", OF_OTHERS)
def test_an_argument_of_another_library_is_refused_with_ours(function: str) -> None:
    dp = make()
    called: Any = getattr(dp, function[3:]) if function.startswith("dp.") else PUBLIC[function]
    for given, ours in OF_OTHERS[function].items():
        call = f"called({given})"
        said = refused(ConfigError, lambda call=call: eval(call, {"called": called}), given)
        assert said.startswith(f"{function} ")
        assert ours in said.replace(given, "", 1), said
