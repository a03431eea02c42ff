"""Objects that are more than a model are refused by name, before anything trains."""

from typing import Any

import flax.core
import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from flax.training import train_state
from support.figures import refused

import replicax as rx
from replicax.core.models.pytree import PytreeDefinition
from replicax.core.models.split import split_model

PARAMS = {"w": jnp.ones(3)}
ADAM = optax.adam(0.1)
NORM = nn.BatchNorm(use_running_average=False)
VARIABLES = NORM.init(jax.random.key(0), jnp.ones((2, 3)))


class FlaxState(train_state.TrainState):
    """As in Flax's ImageNet example."""

    batch_stats: Any


def replicax_state() -> rx.TrainState:
    dp = rx.DataParallel(lambda m, b, k: b * m["w"].sum(), ADAM, mode="single")
    return dp.init(PARAMS)


FOREIGN = {
    "flax state": (
        lambda: FlaxState.create(apply_fn=NORM.apply, tx=ADAM, **VARIABLES),
        "flax.training.train_state.TrainState",
        "module.bind",
    ),
    "nnx optimizer": (
        lambda: nnx.Optimizer(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), ADAM, wrt=nnx.Param),
        "flax.nnx.Optimizer",
        "pass the NNX model",
    ),
    "nnx model and optimizer": (
        lambda: nnx.ModelAndOptimizer(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), ADAM, wrt=nnx.Param),
        "flax.nnx.Optimizer",
        "pass the NNX model",
    ),
    "linen variables": (lambda: VARIABLES, "batch_stats", "module.bind(variables)"),
    "frozen": (lambda: flax.core.freeze(VARIABLES), "batch_stats", "module.bind(variables)"),
    "linen variables of two": (
        lambda: {"generator": VARIABLES, "critic": VARIABLES},
        "model['critic']",
        "module.bind(variables)",
    ),
    "another collection": (
        lambda: {"params": PARAMS, "spectral": {"sigma": jnp.ones(1)}},
        "params and spectral",
        "module.bind(variables)",
    ),
    "bound linen in a dict": (lambda: {"a": NORM.bind(VARIABLES)}, "model['a']", "submodules"),
    "nnx in a dict": (lambda: {"a": nnx.BatchNorm(3, rngs=nnx.Rngs(0))}, "model['a']", "nnx.Dict"),
    "nnx state": (
        lambda: nnx.state(nnx.BatchNorm(3, rngs=nnx.Rngs(0))),
        "nnx.BatchStat",
        "pass the NNX model",
    ),
    "replicax state": (replicax_state, "replicax.TrainState", "dp.model(state)"),
    "optax state": (lambda: (PARAMS, ADAM.init(PARAMS)), "model[1][0]", "ScaleByAdamState"),
    "accumulating state": (
        lambda: (PARAMS, optax.MultiSteps(ADAM, 2).init(PARAMS)),
        "model[1]",
        "MultiStepsState",
    ),
    "optimizer": (lambda: {**PARAMS, "tx": ADAM}, "model['tx']", "optax.GradientTransformation"),
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_what_is_no_model_is_refused_by_name(kind: str) -> None:
    make, name, fix = FOREIGN[kind]
    dp = rx.DataParallel(lambda m, b, k: b, ADAM, mode="single")
    with refused(rx.errors.ConfigError, name, fix):
        dp.init(make())


@pytest.mark.parametrize(
    "model",
    [
        {"params": PARAMS},
        {"params": PARAMS, "batch_stats": {}},
        {"params": PARAMS, "scale": jnp.ones(1)},
        {"params": PARAMS, "tables": {"ids": jnp.arange(3)}},
        {**PARAMS, "module": nn.Dense(3)},
        nnx.state(nnx.Linear(2, 2, rngs=nnx.Rngs(0))),
        optax.LookaheadParams(PARAMS, PARAMS),
    ],
    ids=["params", "no statistics", "beside", "constants", "unbound", "nnx params", "lookahead"],
)
def test_a_pytree_of_parameters_trains_whole(model: Any) -> None:
    definition, params, _ = split_model(model)
    assert type(definition) is PytreeDefinition
    floating = [
        leaf
        for leaf in jax.tree.leaves(model)
        if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jnp.floating)
    ]
    assert len(jax.tree.leaves(params)) == len(floating) > 0
