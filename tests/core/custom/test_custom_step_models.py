"""A custom step with models that write state: `rx.Stateful`, Flax NNX and Flax Linen.

Each is compared with the built-in step, whose numbers are those of plain JAX on one device.
"""

import functools
from typing import Any

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from support import training
from support.custom_step import BATCH, parallel, rows, trained
from support.resumable import bits
from support.tiers import only
from support.training import assert_near, losses

import replicax as rx

OPTIMIZER = optax.sgd(0.05, momentum=0.9)
PLACES = [("single", 1), *((mode, n) for mode in ("jit", "shard_map", "pmap") for n in (1, 2, 4))]
EXACT = [("exact", 1), ("exact", 2), ("exact", 4)]


def built_in(loss: Any, mode: str, devices: int, **settings: Any) -> rx.DataParallel:
    return training.parallel(loss, OPTIMIZER, mode=mode, devices=devices, **settings)


# Flax NNX: a step as it is written without Replicax, with the model in its state in several forms.


class Network(nnx.Module):
    def __init__(self, seed: int = 0) -> None:
        rngs = nnx.Rngs(seed)
        self.first = nnx.Linear(4, 8, use_bias=False, rngs=rngs)  # a bias would have gradient 0
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.last = nnx.Linear(8, 1, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.last(jnp.tanh(self.norm(self.first(x))))


def nnx_loss(model: Any, batch: Any, key: Any) -> Any:
    return jnp.sum((model(batch["x"]) - batch["y"]) ** 2, -1)


def updated(model: Any, moments: Any, batch: Any, key: Any) -> Any:
    means, gradient = rx.value_and_grad(nnx_loss)(model, batch, key)
    params = nnx.state(model, nnx.Param)
    updates, moments = OPTIMIZER.update(gradient, moments, params)
    nnx.update(model, optax.apply_updates(params, updates))
    return moments, means


def with_module(state: Any, batch: Any, key: Any) -> Any:
    moments, means = updated(state["model"], state["moments"], batch, key)
    return {"model": state["model"], "moments": moments}, means


def with_optimizer(state: Any, batch: Any, key: Any) -> Any:
    means, gradient = rx.value_and_grad(nnx_loss)(state["model"], batch, key)
    state["moments"].update(state["model"], gradient)
    return state, means


def with_graph(state: Any, batch: Any, key: Any) -> Any:
    model = nnx.merge(*state["model"])
    moments, means = updated(model, state["moments"], batch, key)
    return {"model": nnx.split(model), "moments": moments}, means


def with_closure(state: Any, batch: Any, key: Any) -> Any:
    graph, _ = nnx.split(Network())
    model = nnx.merge(graph, state["model"])
    moments, means = updated(model, state["moments"], batch, key)
    return {"model": nnx.state(model), "moments": moments}, means


FORMS = {
    "module": (with_module, lambda model: model),
    "optimizer": (with_optimizer, lambda model: model),
    "graph": (with_graph, nnx.split),
    "closure": (with_closure, nnx.state),
}


def of_form(form: str) -> tuple[Any, Any]:
    """Return the step, and the state before it."""
    (step, kept), model = FORMS[form], Network()
    moments: Any = OPTIMIZER.init(nnx.state(model, nnx.Param))
    if form == "optimizer":
        moments = nnx.Optimizer(model, OPTIMIZER, wrt=nnx.Param)
    return step, {"model": kept(model), "moments": moments}


def state_of(model: Any) -> Any:
    """Return the arrays of an NNX model in any of the forms."""
    if isinstance(model, tuple):
        return model[1]
    return nnx.state(model) if isinstance(model, nnx.Module) else model


@functools.cache
def by_the_built_in_step(mode: str, devices: int) -> tuple[Any, list[dict[str, float]]]:
    dp = built_in(nnx_loss, mode, devices)
    state, told = trained(dp, Network(), batch_size=16)
    return nnx.state(dp.model(state)), told


FORMS_AND_PLACES = [(form, *place) for form in FORMS for place in PLACES + EXACT]
KEPT = [("module", "jit", 4), ("module", "exact", 2), ("optimizer", "shard_map", 4)]


@pytest.mark.parametrize(
    ("form", "mode", "devices"), only(KEPT, FORMS_AND_PLACES, FORMS_AND_PLACES[::3])
)
def test_an_nnx_model_trains_in_any_form(form: str, mode: str, devices: int) -> None:
    step, begin = of_form(form)
    wanted, theirs = by_the_built_in_step(
        *(("exact", devices) if mode == "exact" else ("single", 1))
    )
    dp = parallel(step, mode, devices)
    found, mine = trained(dp, begin, batch_size=16)
    assert losses(mine) == pytest.approx(losses(theirs), rel=1e-6)
    assert_near(state_of(dp.model(found)["model"]), wanted)


@pytest.mark.parametrize("mode", only(["shard_map"], ["jit", "shard_map"]))
def test_micro_batches_hand_the_statistics_on(mode: str) -> None:
    step, begin = of_form("module")
    _, theirs = trained(built_in(nnx_loss, mode, 4, accumulate=2), Network(), batch_size=16)
    _, mine = trained(parallel(step, mode, 4, accumulate=2), begin, batch_size=16)
    assert losses(mine) == pytest.approx(losses(theirs), rel=1e-6)


def test_the_gradient_is_as_nnx_has_it() -> None:
    model, batch = Network(), rows()
    _, found = rx.value_and_grad(nnx_loss)(model, batch)
    evaluated = Network()
    evaluated.eval()
    wanted = nnx.grad(lambda model: jnp.mean(nnx_loss(model, batch, None)))(evaluated)
    assert jax.tree.structure(found) == jax.tree.structure(nnx.state(model, nnx.Param))
    assert_near(found, wanted)


def evaluated(state: Any, batch: Any, key: Any) -> Any:
    assert key is None
    return nnx_loss(state["model"], batch, key)


def test_a_module_in_the_state_is_evaluated_in_inference_mode() -> None:
    dp = parallel(with_module, "shard_map", 4)
    state, _ = trained(dp, of_form("module")[1], batch_size=16)
    before = bits(state)
    found = dp.evaluate(state, dp.feed(rows(), 16), loss=evaluated)
    predicted = dp.predict(state, rows(), lambda s, b, _: s["model"](b["x"])[:, 0], batch_size=16)
    model = dp.model(state)["model"]
    assert not model.norm.use_running_average
    model.eval()
    assert found["loss"] == pytest.approx(float(nnx_loss(model, rows(), None).mean()), rel=1e-5)
    np.testing.assert_allclose(predicted, model(rows()["x"])[:, 0], rtol=1e-4, atol=1e-6)
    assert bits(state) == before


def test_an_equinox_module_is_too() -> None:
    def loss(state: Any, batch: Any, key: Any) -> Any:
        dropped = jax.vmap(lambda row: state["net"](row, key=key))(batch["x"])
        return jnp.sum(dropped, -1)

    def step(state: Any, batch: Any, key: Any) -> Any:
        return state, {"loss": rx.mean(batch["y"][:, 0])}

    dp = parallel(step, "jit", 4, loss=loss)
    state = dp.init({"net": eqx.nn.Dropout(0.5), "w": jnp.ones(2), "key": jax.random.key(0)})
    found = dp.evaluate(state, dp.feed(rows(), BATCH))
    assert found["loss"] == pytest.approx(float(rows()["x"].sum(-1).mean()), abs=1e-6)


# Flax Linen: a bound module cannot keep what it writes.


class Dense(nn.Module):
    axis: str | None = None

    @nn.compact
    def __call__(self, x: jax.Array, training: bool) -> jax.Array:
        x = nn.Dense(8, use_bias=False)(x)
        x = nn.BatchNorm(not training, axis_name=self.axis)(x)
        return nn.Dense(1)(jnp.tanh(x))


def linen_loss(model: Any, batch: Any, key: Any) -> Any:
    return jnp.sum((model(batch["x"], key is not None) - batch["y"]) ** 2, -1)


LINEN = [(axis, *place) for axis in (None, "data") for place in PLACES + EXACT]


@pytest.mark.parametrize(
    ("axis", "mode", "devices"), only([("data", "shard_map", 4), ("data", "jit", 2)], LINEN)
)
def test_a_linen_module_returns_what_it_writes(axis: Any, mode: str, devices: int) -> None:
    module = Dense(axis)
    variables = Dense().init(jax.random.key(0), rows()["x"], False)

    def step(state: Any, batch: Any, key: Any) -> Any:
        model = module.bind(state["variables"])
        means, gradient, others = rx.value_and_grad(linen_loss)(model, batch, key)
        params = state["variables"]["params"]
        updates, moments = OPTIMIZER.update(gradient, state["moments"], params)
        params = optax.apply_updates(params, updates)
        return {"variables": {"params": params, **others}, "moments": moments}, means

    built = built_in(linen_loss, *(("exact", devices) if mode == "exact" else ("single", 1)))
    wanted, theirs = trained(built, module.bind(variables), batch_size=16)
    begin = {"variables": variables, "moments": OPTIMIZER.init(variables["params"])}
    found, mine = trained(parallel(step, mode, devices), begin, batch_size=16)
    assert losses(mine) == pytest.approx(losses(theirs), rel=1e-6)
    assert_near(found.params["variables"], {"params": wanted.params, **wanted.extras})
