"""Mistakes are refused in one line that names the fix; similar correct calls work."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.example_libraries import optimizers
from optax.contrib import sam
from support.mistakes import (
    ADAM,
    MODEL,
    ROWS,
    SGD,
    init,
    loss,
    make,
    refused,
    step,
    whole,
)

import replicax as rx
from replicax.errors import ConfigError, DataError, LossError, StateError

CLIPPED = optax.chain(optax.clip(1.0), SGD)
LOOKAHEAD = optax.lookahead(ADAM, 5, 0.5)
AVERAGES_ROWS = optax.stateless(lambda rows, _: jax.tree.map(lambda leaf: leaf.mean(0), rows))
NNX_OPTIMIZER = nnx.Optimizer(nnx.Linear(3, 1, rngs=nnx.Rngs(0)), ADAM, wrt=nnx.Param)
PAIRS = optax.LookaheadParams.init_synced(MODEL)
HAIKU_STATE = {"net/bn/~/mean_ema": {name: np.zeros(3) for name in ("average", "hidden")}}
HAIKU_STATE["net/bn/~/mean_ema"]["counter"] = np.int32(0)


def summed(*arguments: Any) -> Any:
    return loss(*arguments).sum()


def with_metrics(**metrics: Any) -> Callable[..., Any]:
    return lambda *arguments: (loss(*arguments), metrics)


def fit(source: Any = ROWS, **more: Any) -> Any:
    dp = make()
    length = {"batch_size": 8, "epochs": 1, "progress": False}
    return rx.fit(dp, dp.init(MODEL), source, **{**length, **more})


def used(again: Callable[..., Any]) -> None:
    dp = make()
    state = dp.init(MODEL)
    dp.step(state, ROWS)
    again(dp, state)


def kept(again: Callable[..., Any]) -> None:
    dp = make()
    state = dp.init(MODEL)
    model = dp.model(state, copy=False)
    again(dp, dataclasses.replace(dp.step(state, ROWS)[0], params=model))


def borrowed(dp: Any, other: Any, model: Any = MODEL) -> None:
    dp.init(model)
    dp.step(other.init(model), ROWS)


CONFIG = {
    # the optimizer
    "lbfgs": (lambda: init(optimizer=optax.lbfgs()), "optax.lbfgs(0.1, linesearch=None)"),
    "sam": (lambda: init(optimizer=sam(ADAM, ADAM, opaque_mode=True)), "opaque_mode=False"),
    "lookahead": (lambda: init(optimizer=LOOKAHEAD), "ema="),
    "lookahead of pairs": (lambda: init(PAIRS, LOOKAHEAD), "update(gradient, state, params)"),
    "per-row gradients": (lambda: init(optimizer=AVERAGES_ROWS), "mean"),
    "optimizer of other parameters": (
        lambda: init(optimizer=optax.masked(ADAM, {"v": True})),
        "update(gradient, state, params)",
    ),
    # the model
    "Linen unbound": (lambda: init(nn.Dense(1)), "model.bind(model.init"),
    "Haiku params and state": (lambda: init((MODEL, HAIKU_STATE)), "the params"),
    # the rest
    "sources by name": (lambda: fit(eval_source={"train": ROWS, "test": ROWS}), "eval_source"),
    "mode typo": (lambda: make(mode="shardmap"), "shard_map"),
}
STATE = {
    "state used twice": (lambda: used(lambda dp, state: dp.step(state, ROWS)), "donate=False"),
    "model of a used state": (lambda: used(lambda dp, state: dp.model(state)), "donate=False"),
    "model kept, and begun from": (
        lambda: kept(lambda dp, state: dp.init(state.params)),
        "copy=False",
    ),
    "model kept, and put back": (
        lambda: kept(lambda dp, state: dp.step(state, ROWS)),
        "copy=False",
    ),
    "model kept, and evaluated": (
        lambda: kept(lambda dp, state: dp.evaluate(state, [ROWS])),
        "copy=False",
    ),
    "optimizers without arrays": (
        lambda: borrowed(make(optimizer=SGD), make(optimizer=CLIPPED)),
        "structure",
    ),
}
LOSS = {
    "sum in shard_map": (lambda: step(summed, mode="shard_map"), "per row"),
    "sum in pmap": (lambda: step(summed, mode="pmap"), "per row"),
    "sum in exact": (lambda: step(summed, mode="exact"), "per row"),
    "sum of micro-batches": (lambda: step(summed, accumulate=2), "per row"),
    "int loss": (lambda: step(lambda *a: loss(*a).astype(int)), "int32"),
    "no loss": (lambda: step(lambda *a: None), "NoneType"),
    "axis name": (lambda: step(lambda *a: jax.lax.pmean(loss(*a), "batch")), "rx.gather(x)"),
    "metric named loss": (lambda: step(with_metrics(loss=1.0)), "rename"),
    "metric of other rows": (lambda: step(with_metrics(x=jnp.ones(3))), "(3,)"),
}
DATA = {"int64": (lambda: step(rows={**ROWS, "y": np.full(8, 2**40)}), "jax_enable_x64")}
CASES: dict[str, Any] = {
    name: (kind, *case)
    for kind, cases in (
        (ConfigError, CONFIG),
        (StateError, STATE),
        (LossError, LOSS),
        (DataError, DATA),
    )
    for name, case in cases.items()
}


@pytest.mark.parametrize("name", CASES)
def test_a_mistake_is_refused_in_one_line(name: str) -> None:
    refused(*CASES[name])


class TorchLike:
    """Looks like `torch.optim.Adam` without a call."""

    def step(self) -> None: ...

    def zero_grad(self) -> None: ...


@pytest.mark.parametrize(
    ("optimizer", "name"),
    [
        (optax.adam, "adam, not called"),
        (optax.MultiSteps, "MultiSteps, not called"),
        (optax.constant_schedule(0.1), "not called"),
        (0.1, "float"),
        ("adam", "str"),
        (NNX_OPTIMIZER, "Opti"),
        (optimizers.adam(0.1), "Optimizer"),
        (functools.partial(optax.adam, 0.1), "partial"),
        (TorchLike(), "TorchLike"),
        (None, "NoneType"),
    ],
)
def test_what_is_no_optimizer_is_refused_by_the_constructor(optimizer: Any, name: str) -> None:
    refused(ConfigError, lambda: make(optimizer=optimizer), name, "optax.adam(1e-3)")


OPTIMIZERS = {
    "sgd": SGD,
    "chain": optax.chain(optax.clip(1.0), optax.lion(0.1)),
    "MultiSteps": optax.MultiSteps(ADAM, 2),
    "inject_hyperparams": optax.inject_hyperparams(optax.adam)(learning_rate=0.1),
    "multi_transform": optax.multi_transform({"a": ADAM}, {"w": "a"}),
    "lbfgs": optax.lbfgs(0.1, linesearch=None),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_what_optax_makes_computes_what_a_loop_by_hand_does(name: str) -> None:
    optimizer = optax.with_extra_args_support(OPTIMIZERS[name])
    dp = make(optimizer=OPTIMIZERS[name])
    state, params, opt_state = dp.init(MODEL), MODEL, optimizer.init(MODEL)
    for _ in range(4):
        state, _ = dp.step(state, ROWS)
        value, gradient = jax.value_and_grad(whole)(params, ROWS, None)
        more = {"value": value} if name == "lbfgs" else {}
        updates, opt_state = optimizer.update(gradient, opt_state, params, **more)
        params = optax.apply_updates(params, updates)
    np.testing.assert_allclose(dp.model(state)["w"], params["w"], rtol=1e-5)
    assert int(state.step) == 4


def test_an_optimizer_may_name_the_replicas() -> None:
    def update(updates: Any, state: Any, params: Any = None) -> Any:
        return jax.tree.map(lambda leaf: jax.lax.pmean(leaf, "data"), updates), state

    average = optax.GradientTransformation(lambda params: (), update)
    metrics = step(optimizer=optax.chain(average, SGD), mode="shard_map", times=2)
    np.testing.assert_allclose(metrics["loss"], step(optimizer=SGD, times=2)["loss"])
