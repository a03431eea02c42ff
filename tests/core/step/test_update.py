"""Gradients as the optimizer receives them, and the arrays that are reduced."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from support.tiers import only

import replicax as rx
from replicax.analysis.compiled import inspect
from replicax.core.models.split import split_model
from replicax.core.step.optimizer import updater
from replicax.train.guarded import guarded

SOURCE = {"x": np.arange(96, dtype=np.float32).reshape(16, 6) / 96, "y": np.ones(16, np.float32)}


def loss(model: Any, batch: Any, key: Any) -> jax.Array:
    return ((batch["x"] @ model["w"]).sum(-1) - batch["y"]) ** 2


def sam() -> optax.GradientTransformation:
    adversarial = optax.chain(optax.contrib.normalize(), optax.sgd(0.05))
    return optax.contrib.sam(optax.sgd(0.1), adversarial, sync_period=2)


def plateau() -> optax.GradientTransformation:
    return optax.chain(optax.sgd(0.1), optax.contrib.reduce_on_plateau(patience=1))


@pytest.mark.parametrize(
    ("optimizer", "expected"),
    [(optax.scale(-0.1), False), (sam(), False), (plateau(), True)],
    ids=["scale", "sam", "plateau"],
)
def test_the_loss_is_given_to_optimizers_that_take_it(optimizer: Any, expected: bool) -> None:
    definition, params, _ = split_model({"w": jax.ShapeDtypeStruct((6, 3), jnp.float32)})
    assert updater(optimizer, None, None, definition, params).takes_value == expected


@pytest.mark.parametrize("make", [sam, plateau], ids=["sam", "plateau"])
@pytest.mark.parametrize("mode", only(["shard_map"], ["single", "jit", "shard_map", "exact"]))
def test_trains_as_optax_alone_does(mode: str, make: Any) -> None:
    dp, optimizer = rx.DataParallel(loss, make(), mode=mode), make()
    params = {"w": jnp.full((6, 3), 0.1)}
    state, opt_state = dp.init(params), optimizer.init(params)
    for _ in range(4):
        state, metrics = dp.step(state, SOURCE)
        value, gradient = jax.value_and_grad(lambda p: loss(p, SOURCE, None).mean())(params)
        extra = {"value": value} if make is plateau else {}
        updates, opt_state = optimizer.update(gradient, opt_state, params, **extra)
        params = optax.apply_updates(params, updates)
        assert float(metrics["loss"]) == pytest.approx(float(value), abs=1e-6)
    np.testing.assert_allclose(state.params["w"], params["w"], atol=1e-6)


@pytest.mark.parametrize("mode", only(["shard_map"], ["single", "shard_map", "exact"]))
def test_weights_may_add_up_to_less_than_0(mode: str) -> None:
    def weighted(model: Any, batch: Any, key: Any) -> Any:
        return rx.Weighted(loss(model, batch, key), batch["weight"])

    batch = {**SOURCE, "weight": np.float32([1, -2] * 8)}
    dp, params = rx.DataParallel(weighted, optax.sgd(0.1), mode=mode), {"w": jnp.ones((6, 3))}
    state, metrics = dp.step(dp.init(params), batch)
    mean = lambda p: jnp.sum(loss(p, batch, None) * batch["weight"]) / -8  # noqa: E731
    value, gradient = jax.value_and_grad(mean)(params)
    assert float(metrics["loss"]) == pytest.approx(float(value), rel=1e-5)
    np.testing.assert_allclose(state.params["w"], params["w"] - 0.1 * gradient["w"], rtol=1e-5)


@pytest.mark.parametrize("mode", ["jit", "shard_map"])
def test_fit_reduces_only_what_the_optimizer_reads(mode: str) -> None:
    """LoRA: a large frozen matrix beside two small trained ones."""

    def adapted(model: Any, batch: Any, key: Any) -> jax.Array:
        hidden = jnp.tanh(batch["x"] @ model["frozen"]) @ model["down"] @ model["up"]
        return (hidden.sum(-1) - batch["y"]) ** 2

    model = {"frozen": jnp.ones((6, 512)), "down": jnp.ones((512, 2)), "up": jnp.ones((2, 3))}
    labels = {"frozen": "frozen", "down": "trained", "up": "trained"}
    transforms = {"trained": optax.adam(1e-3), "frozen": optax.set_to_zero()}
    dp = rx.DataParallel(adapted, optax.multi_transform(transforms, labels), mode=mode)
    state = dp.init(model)
    plain, fitted = (
        inspect(each.lower(state, SOURCE).compile()) for each in (dp, guarded(dp, state))
    )
    moved = [sum(each.bytes for each in step.collectives) for step in (plain, fitted)]
    trained = 4 * (512 * 2 + 2 * 3)
    assert trained <= moved[0] <= trained + 64
    assert moved[1] - moved[0] <= 16  # counts of values that are not finite
    assert fitted.flops == plain.flops
