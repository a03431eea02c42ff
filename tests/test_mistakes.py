"""Mistakes that users made: each is refused in one line that names the fix."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from flax import nnx
from flax.training import train_state
from jax.example_libraries import optimizers
from support.tiers import exhaustive

import replicax as rx
from replicax.errors import ConfigError, DataError, LossError, ReplicaxError, StateError

PARAMS = {"w": np.ones(3, np.float32)}
ROWS = {"x": np.arange(24, dtype=np.float32).reshape(8, 3) / 24}
ADAM = optax.adam(0.1)
LINEAR = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
VARIABLES = nn.BatchNorm(use_running_average=False).init(jax.random.key(0), ROWS["x"])
AVERAGES_ROWS = optax.stateless(lambda rows, _: jax.tree.map(lambda leaf: leaf.mean(0), rows))
HAIKU_STATE = {"net/bn/~/mean_ema": {name: np.zeros(3) for name in ("average", "hidden")}}
HAIKU_STATE["net/bn/~/mean_ema"]["counter"] = np.int32(0)


def loss(model: Any, batch: Any, key: Any) -> Any:
    return (batch["x"] @ model["w"]) ** 2


def make(function: Any = loss, optimizer: Any = ADAM, devices: int = 4, **more: Any) -> Any:
    mesh = rx.make_mesh(devices=jax.devices()[:devices])
    return rx.DataParallel(function, optimizer, **{"mesh": mesh, **more})


def init(model: Any = PARAMS, optimizer: Any = ADAM, **more: Any) -> Any:
    return make(optimizer=optimizer, **more).init(model)


def step(
    function: Any = loss, rows: Any = None, optimizer: Any = ADAM, times: int = 1, **more: Any
) -> Any:
    dp = make(function, optimizer, **more)
    state = dp.init(PARAMS)
    for _ in range(times):
        state, metrics = dp.step(state, ROWS if rows is None else rows)
    return metrics


def evaluate(function: Any) -> Any:
    dp = make(function)
    return dp.evaluate(dp.init(PARAMS), [ROWS])


def fit(source: Any = ROWS, function: Any = loss, **more: Any) -> Any:
    dp = make(function)
    length = {"batch_size": 8, "epochs": 1, "progress": False}
    return rx.fit(dp, dp.init(PARAMS), source, **{**length, **more})


def with_leaf(leaf: Any) -> Any:
    return step(rows={**ROWS, "y": leaf})


def without_init() -> None:
    make().step(PARAMS, ROWS)


def init_of_another() -> None:
    dp = make()
    dp.init(PARAMS)
    dp.step(PARAMS, ROWS)


def inside_jit() -> None:
    dp = make()
    jax.jit(dp.step)(dp.init(PARAMS), ROWS)


def used_twice() -> None:
    dp = make()
    state = dp.init(PARAMS)
    dp.step(state, ROWS)
    dp.step(state, ROWS)


def kept(again: Callable[..., Any]) -> None:
    dp = make()
    state = dp.init(PARAMS)
    model = dp.model(state, copy=False)
    again(dp, dp.step(state, ROWS)[0], model)


def of_another_optimizer() -> None:
    dp = make()
    dp.init(PARAMS)
    dp.evaluate(init(optimizer=optax.sgd(0.1, momentum=0.9)), [ROWS])


def read_once() -> Iterator[Any]:
    yield ROWS


def flax_state() -> Any:
    return train_state.TrainState.create(apply_fn=loss, params=PARAMS, tx=ADAM)


def noisy(model: Any, batch: Any, key: Any) -> Any:
    return loss(model, batch, key) + jax.random.normal(key, (len(batch["x"]),))


def metric(**metrics: Any) -> Callable[..., Any]:
    return lambda *arguments: (loss(*arguments), metrics)


def whole(*arguments: Any) -> Any:
    return loss(*arguments).mean()


ZERO = {
    "ints": lambda *a: (loss(*a) * 9).astype(int).mean() + 0.0,
    "argmax": lambda m, b, k: jnp.argmax(b["x"] * m["w"], axis=1).astype(float),
    "comparison": lambda *a: jnp.where(loss(*a) > 0.5, 1.0, 0.0),
    "constant": lambda *a: jax.lax.stop_gradient(loss(*a)),
    "round": lambda *a: jnp.round(loss(*a)),
    "no parameter": lambda m, b, k: b["x"].sum(1),
    "scan": lambda m, b, k: jax.lax.scan(lambda c, x: (c, jnp.sign(x @ m["w"])), 0.0, b["x"])[1],
}
MOVES = {
    "scan": lambda m, b, k: jax.lax.scan(lambda c, x: (c, x @ m["w"]), 0.0, b["x"])[1],
    "relu": lambda *a: jax.nn.relu(loss(*a)),
    "checkpoint": jax.checkpoint(loss),
    "jit": jax.jit(loss),
    "straight through": lambda *a: loss(*a) + jax.lax.stop_gradient(jnp.round(loss(*a)) - loss(*a)),
    "drawn": lambda m, b, k: jax.random.normal(k, (8,)) * m["w"][0],
    "penalty": lambda m, b, k: jnp.full(8, (m["w"] ** 2).sum()),
    "cond": lambda m, b, k: jax.lax.cond(
        b["x"][0, 0] > 0, lambda: b["x"] @ m["w"], lambda: b["x"][:, 0]
    ),
}


@pytest.mark.parametrize("name", ZERO)
@pytest.mark.parametrize("mode", ["jit", exhaustive("shard_map")])
def test_a_loss_without_a_gradient_is_refused(name: str, mode: str) -> None:
    with pytest.raises(LossError, match=r"gradient of 0.*stop_gradient"):
        step(ZERO[name], mode=mode)
    dp = make(ZERO[name], mode=mode)
    assert dp.evaluate(dp.init(PARAMS), [ROWS])["rows"] == 8


@pytest.mark.parametrize("name", MOVES)
def test_a_loss_with_a_gradient_somewhere_trains(name: str) -> None:
    assert np.isfinite(step(MOVES[name])["loss"])


CASES: dict[str, tuple[Callable[[], Any], type[ReplicaxError], str]] = {
    # the optimizer
    "optimizer of example_libraries": (
        lambda: make(optimizer=optimizers.adam(0.1)),
        ConfigError,
        "optax.adam(1e-3)",
    ),
    "nnx.Optimizer": (
        lambda: make(optimizer=nnx.Optimizer(LINEAR, ADAM, wrt=nnx.Param)),
        ConfigError,
        "optax.adam(1e-3)",
    ),
    "optimizer not called": (lambda: make(optimizer=optax.adam), ConfigError, "adam, not called"),
    "a number for an optimizer": (lambda: make(optimizer=0.1), ConfigError, "optax.adam(1e-3)"),
    "lbfgs": (
        lambda: init(optimizer=optax.lbfgs()),
        ConfigError,
        "optax.lbfgs(0.1, linesearch=None)",
    ),
    "sam, opaque": (
        lambda: init(optimizer=optax.contrib.sam(ADAM, ADAM, opaque_mode=True)),
        ConfigError,
        "opaque_mode=False",
    ),
    "lookahead": (lambda: init(optimizer=optax.lookahead(ADAM, 5, 0.5)), ConfigError, "ema="),
    "lookahead of pairs": (
        lambda: init(
            optax.LookaheadParams.init_synced(PARAMS), optimizer=optax.lookahead(ADAM, 5, 0.5)
        ),
        ConfigError,
        "update(gradient, state, params)",
    ),
    "per-row gradients": (
        lambda: init(optimizer=AVERAGES_ROWS),
        ConfigError,
        "mean",
    ),
    "optimizer of other parameters": (
        lambda: init(optimizer=optax.masked(ADAM, {"v": True})),
        ConfigError,
        "update(gradient, state, params)",
    ),
    # the state
    "forgot init": (without_init, StateError, "init(model)"),
    "model for a state": (init_of_another, StateError, "dp.init(model)"),
    "step in jit": (inside_jit, StateError, "jax.jit"),
    "state used twice": (used_twice, StateError, "donate=False"),
    "model kept, and begun from": (
        lambda: kept(lambda dp, state, model: dp.init(model)),
        StateError,
        "copy=False",
    ),
    "model kept, and put back": (
        lambda: kept(
            lambda dp, state, model: dp.step(dataclasses.replace(state, params=model), ROWS)
        ),
        StateError,
        "copy=False",
    ),
    "model kept, and evaluated": (
        lambda: kept(
            lambda dp, state, model: dp.evaluate(dataclasses.replace(state, params=model), [ROWS])
        ),
        StateError,
        "copy=False",
    ),
    "state of another optimizer": (of_another_optimizer, StateError, "optimizer"),
    # the model
    "Flax TrainState": (lambda: init(flax_state()), ConfigError, "module.bind"),
    "nnx.Optimizer as model": (
        lambda: init(nnx.Optimizer(LINEAR, ADAM, wrt=nnx.Param)),
        ConfigError,
        "NNX model",
    ),
    "Linen variables": (lambda: init(VARIABLES), ConfigError, "module.bind(variables)"),
    "Linen unbound": (lambda: init(nn.Dense(1)), ConfigError, "bind"),
    "Haiku params and state": (lambda: init((PARAMS, HAIKU_STATE)), ConfigError, "the params"),
    # the loss
    "two arguments": (lambda: make(lambda model, batch: 0), ConfigError, "loss(model, batch, key)"),
    "needs the key": (lambda: evaluate(noisy), LossError, "key is not None"),
    "loss and logits": (lambda: step(lambda *a: (loss(*a), a[1]["x"])), LossError, "dict"),
    "sum in shard_map": (
        lambda: step(lambda *a: loss(*a).sum(), mode="shard_map"),
        LossError,
        "per row",
    ),
    "sum in pmap": (lambda: step(lambda *a: loss(*a).sum(), mode="pmap"), LossError, "per row"),
    "sum in exact": (
        lambda: step(lambda *a: loss(*a).sum(), mode="exact"),
        LossError,
        "per row",
    ),
    "sum of micro-batches": (
        lambda: step(lambda *a: loss(*a).sum(), accumulate=2),
        LossError,
        "per row",
    ),
    "int loss": (lambda: step(lambda *a: loss(*a).astype(int)), LossError, "int32"),
    "no loss": (lambda: step(lambda *a: None), LossError, "NoneType"),
    "nan at step one": (lambda: step(lambda *a: loss(*a) / 0 * 0), LossError, "nan"),
    "scalar beside padding": (lambda: step(whole, {"x": ROWS["x"][:6]}), LossError, "per row"),
    "axis name": (
        lambda: step(lambda *a: jax.lax.pmean(loss(*a), "batch")),
        LossError,
        "rx.gather(x)",
    ),
    "metric named loss": (lambda: step(metric(loss=1.0)), LossError, "rename"),
    "metric of other rows": (lambda: step(metric(x=jnp.ones(3))), LossError, "(3,)"),
    # the data
    "leading dim": (lambda: with_leaf(np.ones(7)), DataError, "7 rows"),
    "scalar leaf": (lambda: with_leaf(1.0), DataError, "scalar"),
    "strings": (lambda: with_leaf(np.array(["a"] * 8)), DataError, "<U1"),
    "objects": (lambda: with_leaf(np.array([None] * 8)), DataError, "object"),
    "int64": (lambda: with_leaf(np.full(8, 2**40)), DataError, "jax_enable_x64"),
    "random keys": (
        lambda: with_leaf(jax.random.split(jax.random.key(0), 8)),
        DataError,
        "jax.random.key_data",
    ),
    "rows < replicas": (lambda: make().feed(ROWS, 2), ConfigError, "2"),
    "read once": (lambda: fit(read_once(), epochs=2, batch_size=None), DataError, "generator"),
    "sources by name": (
        lambda: fit(eval_source={"train": ROWS, "test": ROWS}),
        ConfigError,
        "eval_source",
    ),
    # the rest
    "mode typo": (lambda: make(mode="shardmap"), ConfigError, "shard_map"),
    "mesh without data": (
        lambda: make(mesh=jax.make_mesh((4,), ("batch",))),
        ConfigError,
        "'data'",
    ),
    "axis that splits nothing": (
        lambda: make(mesh=rx.make_mesh(data=2, model=2, devices=jax.devices()[:4])),
        ConfigError,
        "'model'",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_mistake_is_refused_in_one_line(name: str) -> None:
    mistake, kind, phrase = CASES[name]
    with pytest.raises(kind) as caught:
        mistake()
    said = str(caught.value)
    assert phrase in said
    assert "\n" not in said


@pytest.mark.parametrize("mode", ["jit", "shard_map"])
def test_a_batch_larger_than_the_first_has_its_own_mean(mode: str) -> None:
    dp = make(optimizer=optax.sgd(0.0), mode=mode)
    state = dp.init(PARAMS)
    for rows in (4, 8, 6, 40):
        batch = {"x": np.resize(ROWS["x"], (rows, 3))}
        state, metrics = dp.step(state, batch)
        np.testing.assert_allclose(metrics["loss"], whole(PARAMS, batch, None), rtol=1e-6)


INSTEAD = {
    "lbfgs": optax.lbfgs(0.1, linesearch=None),
    "sam": optax.contrib.sam(optax.sgd(0.1), optax.sgd(0.05), sync_period=2),
    "plateau": optax.chain(ADAM, optax.contrib.reduce_on_plateau()),
    "multi_transform": optax.multi_transform({"a": ADAM}, {"w": "a"}),
}


@pytest.mark.parametrize("name", INSTEAD)
def test_what_is_named_instead_computes_what_a_loop_by_hand_does(name: str) -> None:
    optimizer = optax.with_extra_args_support(INSTEAD[name])
    dp = make(optimizer=INSTEAD[name])
    state, params = dp.init(PARAMS), jax.tree.map(jnp.asarray, PARAMS)
    opt_state = optimizer.init(params)
    for _ in range(4):
        state, _ = dp.step(state, ROWS)
        value, gradient = jax.value_and_grad(whole)(params, ROWS, None)
        more = {"value": value} if name in ("lbfgs", "plateau") else {}
        updates, opt_state = optimizer.update(gradient, opt_state, params, **more)
        params = optax.apply_updates(params, updates)
    np.testing.assert_allclose(dp.model(state)["w"], params["w"], rtol=1e-5)


def test_an_optimizer_may_name_the_replicas() -> None:
    def update(updates: Any, state: Any, params: Any = None) -> Any:
        return jax.tree.map(lambda leaf: jax.lax.pmean(leaf, "data"), updates), state

    average = optax.GradientTransformation(lambda params: (), update)
    metrics = step(optimizer=optax.chain(average, optax.sgd(0.1)), mode="shard_map", times=2)
    np.testing.assert_allclose(metrics["loss"], step(optimizer=optax.sgd(0.1), times=2)["loss"])
