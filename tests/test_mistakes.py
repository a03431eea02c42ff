"""Mistakes are refused in one line that names the fix; what only resembles one works."""

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
from flax.training import train_state
from jax.example_libraries import optimizers
from optax.contrib import reduce_on_plateau, sam
from support.figures import assert_mentions
from support.tiers import exhaustive

import replicax as rx
from replicax.errors import ConfigError, DataError, LossError, ReplicaxError, StateError

MODEL = {"w": jnp.ones(3)}
WIDE = {"w": jnp.arange(48.0).reshape(3, 16)}
ROWS = {"x": np.arange(24, dtype=np.float32).reshape(8, 3) / 24}
MODES = ("single", "jit", "shard_map", "pmap", "exact")
ADAM, SGD = optax.adam(0.1), optax.sgd(0.1)
CLIPPED = optax.chain(optax.clip(1.0), SGD)
LOOKAHEAD = optax.lookahead(ADAM, 5, 0.5)
AVERAGES_ROWS = optax.stateless(lambda rows, _: jax.tree.map(lambda leaf: leaf.mean(0), rows))
NNX_OPTIMIZER = nnx.Optimizer(nnx.Linear(3, 1, rngs=nnx.Rngs(0)), ADAM, wrt=nnx.Param)
PAIRS = optax.LookaheadParams.init_synced(MODEL)
VARIABLES = nn.BatchNorm(use_running_average=False).init(jax.random.key(0), ROWS["x"])
HAIKU_STATE = {"net/bn/~/mean_ema": {name: np.zeros(3) for name in ("average", "hidden")}}
HAIKU_STATE["net/bn/~/mean_ema"]["counter"] = np.int32(0)


def loss(model: Any, batch: Any, key: Any) -> Any:
    return (batch["x"] @ model["w"]) ** 2


def whole(*arguments: Any) -> Any:
    return loss(*arguments).mean()


def summed(*arguments: Any) -> Any:
    return loss(*arguments).sum()


def wide(model: Any, batch: Any, key: Any) -> Any:
    return (batch["x"] @ model["w"]).sum(1)


def with_metrics(**metrics: Any) -> Callable[..., Any]:
    return lambda *arguments: (loss(*arguments), metrics)


def make(function: Any = loss, optimizer: Any = ADAM, **options: Any) -> Any:
    mesh = rx.make_mesh(devices=jax.devices()[: 1 if options.get("mode") == "single" else 4])
    return rx.DataParallel(function, optimizer, **{"mesh": mesh, **options})


def init(model: Any = MODEL, optimizer: Any = ADAM) -> Any:
    return make(optimizer=optimizer).init(model)


def step(function: Any = loss, rows: Any = ROWS, times: int = 1, **options: Any) -> Any:
    dp = make(function, **options)
    state = dp.init(MODEL)
    for _ in range(times):
        state, metrics = dp.step(state, rows)
    return metrics


def fit(source: Any = ROWS, **more: Any) -> Any:
    dp = make()
    length = {"batch_size": 8, "epochs": 1, "progress": False}
    return rx.fit(dp, dp.init(MODEL), source, **{**length, **more})


def with_leaf(leaf: Any) -> Any:
    return step(rows={**ROWS, "y": leaf})


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


def step_and_evaluate(dp: Any) -> tuple[Callable[..., Any], ...]:
    return dp.step, lambda state, batch: dp.evaluate(state, [batch])


def refused(kind: type[ReplicaxError], call: Callable[[], Any], *words: str) -> str:
    """Check that `call` is refused in one line with these `words`, and return the line."""
    with pytest.raises(kind) as caught:
        call()
    said = str(caught.value)
    assert "\n" not in said
    assert_mentions(said, *words)
    return said


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
    "Flax TrainState": (
        lambda: init(train_state.TrainState.create(apply_fn=loss, params=MODEL, tx=ADAM)),
        "module.bind",
    ),
    "nnx.Optimizer as model": (lambda: init(NNX_OPTIMIZER), "NNX model"),
    "Linen variables": (lambda: init(VARIABLES), "module.bind(variables)"),
    "Linen unbound": (lambda: init(nn.Dense(1)), "bind"),
    "Haiku params and state": (lambda: init((MODEL, HAIKU_STATE)), "the params"),
    # the rest
    "rows < replicas": (lambda: make().feed(ROWS, 2), "2"),
    "sources by name": (lambda: fit(eval_source={"train": ROWS, "test": ROWS}), "eval_source"),
    "mode typo": (lambda: make(mode="shardmap"), "shard_map"),
    "mesh without data": (lambda: make(mesh=jax.make_mesh((4,), ("batch",))), "'data'"),
    "axis that splits nothing": (
        lambda: make(mesh=rx.make_mesh(data=2, model=2, devices=jax.devices()[:4])),
        "'model'",
    ),
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
    "state of another layout": (
        lambda: borrowed(make(wide), make(wide, layout="zero1"), WIDE),
        "2 arrays",
        "layout",
    ),
}
LOSS = {
    "sum in shard_map": (lambda: step(summed, mode="shard_map"), "per row"),
    "sum in pmap": (lambda: step(summed, mode="pmap"), "per row"),
    "sum in exact": (lambda: step(summed, mode="exact"), "per row"),
    "sum of micro-batches": (lambda: step(summed, accumulate=2), "per row"),
    "int loss": (lambda: step(lambda *a: loss(*a).astype(int)), "int32"),
    "no loss": (lambda: step(lambda *a: None), "NoneType"),
    "nan at step one": (lambda: step(lambda *a: loss(*a) / 0 * 0), "nan"),
    "scalar beside padding": (lambda: step(whole, {"x": ROWS["x"][:6]}), "per row"),
    "axis name": (lambda: step(lambda *a: jax.lax.pmean(loss(*a), "batch")), "rx.gather(x)"),
    "metric named loss": (lambda: step(with_metrics(loss=1.0)), "rename"),
    "metric of other rows": (lambda: step(with_metrics(x=jnp.ones(3))), "(3,)"),
}
DATA = {
    "leading dim": (lambda: with_leaf(np.ones(7)), "7 rows"),
    "scalar leaf": (lambda: with_leaf(1.0), "scalar"),
    "strings": (lambda: with_leaf(np.array(["a"] * 8)), "<U1"),
    "objects": (lambda: with_leaf(np.array([None] * 8)), "object"),
    "int64": (lambda: with_leaf(np.full(8, 2**40)), "jax_enable_x64"),
}
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
    """`torch.optim.Adam`, as far as anybody can see without calling it."""

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
    "sam": sam(SGD, optax.sgd(0.05), sync_period=2),
    "plateau": optax.chain(ADAM, reduce_on_plateau()),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_what_optax_makes_computes_what_a_loop_by_hand_does(name: str) -> None:
    optimizer = optax.with_extra_args_support(OPTIMIZERS[name])
    dp = make(optimizer=OPTIMIZERS[name])
    state, params, opt_state = dp.init(MODEL), MODEL, optimizer.init(MODEL)
    for _ in range(4):
        state, _ = dp.step(state, ROWS)
        value, gradient = jax.value_and_grad(whole)(params, ROWS, None)
        more = {"value": value} if name in ("lbfgs", "plateau") else {}
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


def two(model, batch) -> Any:
    return loss(model, batch, None)


@functools.wraps(two)
def wrapped(*arguments: Any) -> Any:
    return two(*arguments[:2])


class Loss:
    """A callable with settings."""

    def __call__(self, model: Any, batch: Any, key: Any, scale: float = 1.0) -> Any:
        return scale * loss(model, batch, key)


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (two, ["(model, batch)", "3 arguments"]),
        (lambda batch: batch, ["(batch)", "3 arguments"]),
        (lambda model, batch, key, state: batch, ["(model, batch, key, state)", "3 arguments"]),
        (lambda model, batch, *, key: batch, ["key", "3 arguments"]),
        (jax.jit(two), ["(model, batch)", "3 arguments"]),
        (SGD, ["GradientTransformation"]),
        ("mse", ["str"]),
        (None, ["NoneType"]),
    ],
)
def test_a_loss_that_cannot_be_called_is_refused_by_the_constructor(
    function: Any, words: list[str]
) -> None:
    refused(ConfigError, lambda: make(function), *words, "loss(model, batch, key)")


ZERO = {
    "ints": lambda *a: (loss(*a) * 9).astype(int).mean() + 0.0,
    "argmax": lambda m, b, k: jnp.argmax(b["x"] * m["w"], axis=1).astype(float),
    "comparison": lambda *a: jnp.where(loss(*a) > 0.5, 1.0, 0.0),
    "constant": lambda *a: jax.lax.stop_gradient(loss(*a)),
    "round": lambda *a: jnp.round(loss(*a)),
    "no parameter": lambda m, b, k: b["x"].sum(1),
    "scan": lambda m, b, k: jax.lax.scan(lambda c, x: (c, jnp.sign(x @ m["w"])), 0.0, b["x"])[1],
}
TRAINS = {
    # with a gradient somewhere
    "scan": lambda m, b, k: jax.lax.scan(lambda c, x: (c, x @ m["w"]), 0.0, b["x"])[1],
    "relu": lambda *a: jax.nn.relu(loss(*a)),
    "straight through": lambda *a: loss(*a) + jax.lax.stop_gradient(jnp.round(loss(*a)) - loss(*a)),
    "drawn": lambda m, b, k: jnp.abs(jax.random.normal(k, (8,))) * m["w"][0],
    "penalty": lambda m, b, k: jnp.full(8, (m["w"] ** 2).sum()),
    "cond": lambda m, b, k: jax.lax.cond(
        b["x"][0, 0] > 0, lambda: b["x"] @ m["w"], lambda: b["x"][:, 0]
    ),
    # of three arguments
    "object": Loss(),
    "method": Loss().__call__,
    "default": lambda model, batch, key=None: loss(model, batch, key),
    "arguments": lambda *arguments: loss(*arguments),
    "keyword": lambda model, *rest, scale=2.0: scale * loss(model, *rest),
    "partial": functools.partial(lambda scale, m, b, k: scale * loss(m, b, k), 2.0),
    "partial keyword": functools.partial(lambda m, b, k, scale: scale * loss(m, b, k), scale=2.0),
    "jit": jax.jit(loss),
    "checkpoint": jax.checkpoint(loss),
    "nnx.jit": nnx.jit(loss),
    "wrapped": wrapped,
}


@pytest.mark.parametrize("name", ZERO)
@pytest.mark.parametrize("mode", ["jit", exhaustive("shard_map")])
def test_a_loss_without_a_gradient_is_refused(name: str, mode: str) -> None:
    with pytest.raises(LossError, match=r"gradient of 0.*stop_gradient"):
        step(ZERO[name], mode=mode)
    dp = make(ZERO[name], mode=mode)
    assert dp.evaluate(dp.init(MODEL), [ROWS])["rows"] == 8


@pytest.mark.parametrize("name", TRAINS)
def test_a_loss_of_three_arguments_with_a_gradient_somewhere_trains(name: str) -> None:
    assert 0 < step(TRAINS[name])["loss"] < np.inf


@pytest.mark.parametrize("mode", MODES)
def test_a_loss_with_logits_beside_it_is_refused_with_their_shapes(mode: str) -> None:
    dp = make(lambda *a: (loss(*a), a[1]["x"]), mode=mode)
    state = dp.init(MODEL)
    for call in step_and_evaluate(dp):
        words = "(float32[8], float32[8,3])", "dict"
        said = refused(LossError, functools.partial(call, state, ROWS), *words)
        assert "Tracer" not in said


DRAWS = {
    "split": lambda key: jax.random.normal(jax.random.split(key)[0], (8,)),
    "fold": lambda key: jax.random.normal(jax.random.fold_in(key, 1), (8,)),
    "draw": lambda key: jax.random.normal(key, (8,)),
    "index": lambda key: jax.random.key_data(key)[0] * jnp.zeros(8),
}


@pytest.mark.parametrize("draw", DRAWS)
@pytest.mark.parametrize("trained", [False, True])
def test_a_loss_that_needs_the_key_in_evaluation_is_told_so(draw: str, trained: bool) -> None:
    dp = make(lambda m, b, key: loss(m, b, key) + DRAWS[draw](key)[: len(b["x"])])
    state = dp.init(MODEL)
    if trained:
        state, _ = dp.step(state, ROWS)
    with pytest.raises((TypeError, ValueError)) as caught:
        dp.evaluate(state, [ROWS])
    assert "key=None" in caught.value.__notes__[0]


def test_an_error_of_the_loss_in_evaluation_is_its_own() -> None:
    calls = []

    def wrong(*arguments: Any) -> Any:
        calls.append(arguments)
        return loss(*arguments) @ jnp.ones((4, 4))

    dp = make(wrong)
    with pytest.raises(TypeError, match=r"\(4, 4\)|\(4,\)"):
        dp.evaluate(dp.init(MODEL), [ROWS])
    assert len(calls) == 1


@pytest.mark.parametrize("mode", ["jit", "shard_map"])
def test_a_batch_larger_than_the_first_has_its_own_mean(mode: str) -> None:
    dp = make(optimizer=optax.sgd(0.0), mode=mode)
    state = dp.init(MODEL)
    for rows in (4, 8, 6, 40):
        batch = {"x": np.resize(ROWS["x"], (rows, 3))}
        state, metrics = dp.step(state, batch)
        np.testing.assert_allclose(metrics["loss"], whole(MODEL, batch, None), rtol=1e-6)


@pytest.mark.parametrize("place", [lambda keys: keys, jax.device_get], ids=["device", "host"])
def test_random_keys_in_a_batch_are_refused_by_name(place: Any) -> None:
    rows = {**ROWS, "noise": place(jax.random.split(jax.random.key(0), 8))}
    dp = make()
    state = dp.init(MODEL)
    for call in (
        lambda: dp.step(state, rows),
        lambda: dp.step(state, jax.tree.map(jnp.asarray, rows)),
        lambda: list(dp.feed(rows, 8)),
        lambda: list(dp.feed([rows])),
        lambda: dp.evaluate(state, [rows]),
        lambda: dp.lower(MODEL, jax.eval_shape(lambda: rows)),
    ):
        said = refused(DataError, call, "jax.random.key_data")
        assert "batch['noise'] holds 8 random keys" in said


def test_keys_as_numbers_may_be_rows() -> None:
    def noisy(model: Any, batch: Any, key: Any) -> Any:
        keys = jax.random.wrap_key_data(batch["noise"])
        return loss(model, batch, key) + jax.vmap(jax.random.normal)(keys)

    rows = {**ROWS, "noise": jax.random.key_data(jax.random.split(jax.random.key(0), 8))}
    metrics = step(noisy, rows, mode="shard_map")
    np.testing.assert_allclose(metrics["loss"], noisy(MODEL, rows, None).mean(), rtol=1e-6)


@pytest.mark.parametrize("call", ["step", "evaluate", "model"])
@pytest.mark.parametrize("known", [False, True])
def test_a_model_is_no_state(call: str, known: bool) -> None:
    dp = make(mode="single")
    if known:
        dp.init(MODEL)
    calls = {
        "step": lambda: dp.step(MODEL, ROWS),
        "evaluate": lambda: dp.evaluate(MODEL, [ROWS]),
        "model": lambda: dp.model(MODEL),
    }
    refused(StateError, calls[call], *(["dp.init(model)", "dict"] if known else ["init(model)"]))


@pytest.mark.parametrize(
    "optimizer", [SGD, optax.sgd(0.1, momentum=0.9), optax.chain(optax.clip(1.0), ADAM)]
)
@pytest.mark.parametrize("mode", ["jit", "pmap"])
def test_a_state_of_another_optimizer_is_refused(optimizer: Any, mode: str) -> None:
    dp = make(mode=mode)
    dp.init(MODEL)
    state = make(optimizer=optimizer, mode=mode).init(MODEL)
    for call in step_and_evaluate(dp):
        refusal = functools.partial(call, state, ROWS)
        refused(StateError, refusal, "state.opt_state", "optimizer")


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ({"w": jnp.ones((3, 2))}, ["['w']", "(3, 2)", "(3,)"]),
        ({"w": jnp.ones(3), "b": jnp.ones(5)}, ["['b']", "(5,)"]),
    ],
)
def test_a_state_of_another_model_is_refused(model: Any, words: list[str]) -> None:
    dp = make()
    state, _ = dp.step(dp.init(MODEL), ROWS)
    other = init(model)
    for _ in range(2):
        refused(StateError, lambda: dp.step(other, ROWS), *words)
    assert int(dp.step(state, ROWS)[0].step) == 2


def test_a_state_with_other_values_is_its_own() -> None:
    """As target networks and schedule-free averages are put in: on the host, in other dtypes."""
    dp = make(donate=False)
    state = dp.init(MODEL)
    for changed in (
        dataclasses.replace(state, params={"w": np.zeros(3)}),
        dataclasses.replace(state, params={"w": state.params["w"] / 2}),
        dataclasses.replace(state, step=3, seed=7),
    ):
        after, _ = dp.step(changed, ROWS)
        assert int(after.step) == int(changed.step) + 1


def test_a_step_inside_jit_is_refused() -> None:
    dp = make()
    state = dp.init(MODEL)
    (batch,) = dp.feed(ROWS, 8)
    for call in (
        lambda: jax.jit(dp.step)(state, ROWS),
        lambda: jax.jit(lambda rows: dp.step(state, rows))(ROWS),
        lambda: jax.jit(lambda rows: dp.step(state, rows))(batch),
        lambda: jax.jit(lambda rows: dp.evaluate(state, [rows]))(ROWS),
        lambda: jax.grad(lambda s: dp.step(s, ROWS)[1]["loss"], allow_int=True)(state),
    ):
        refused(StateError, call, "jax.jit")
    assert int(dp.step(state, batch)[0].step) == 1


@pytest.mark.parametrize("mode", ["single", "jit", "shard_map", "pmap"])
def test_a_model_outlives_the_state_that_it_was_taken_from(mode: str) -> None:
    dp = make(mode=mode)
    state = dp.init(MODEL)
    model = dp.model(state)
    for _ in range(2):
        state, _ = dp.step(state, ROWS)
    np.testing.assert_array_equal(model["w"], MODEL["w"])
    assert not np.allclose(dp.model(state)["w"], model["w"])


@pytest.mark.parametrize("layout", ["replicated", "fsdp"])
def test_a_model_lies_where_its_state_does(layout: str) -> None:
    dp = make(wide, layout=layout)
    state = dp.init(WIDE)
    model = dp.model(state)
    assert model["w"].sharding.is_equivalent_to(state.params["w"].sharding, 2)
    np.testing.assert_array_equal(model["w"], WIDE["w"])


@pytest.mark.parametrize(("options", "asked"), [({}, {"copy": False}), ({"donate": False}, {})])
def test_a_model_that_needs_no_copy_is_the_state(options: Any, asked: Any) -> None:
    dp = make(mode="single", **options)
    state = dp.init(MODEL)
    assert dp.model(state, **asked)["w"] is state.params["w"]
