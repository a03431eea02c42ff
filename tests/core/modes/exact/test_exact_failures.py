"""Regressions in mode `exact`: bits that once depended on the number of devices."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from support.tiers import only
from support.training import epochs, parallel

import replicax as rx
from replicax.train.files.fingerprint import sha256
from replicax.train.guarded import guarded, with_losses

ROWS, FEATURES = 32, 6
STEPS = 6


def rows() -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    return {
        "x": random.normal(size=(ROWS, FEATURES)).astype(np.float32),
        "y": random.normal(size=ROWS).astype(np.float32),
    }


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(list(shape)).normal(size=shape).astype(np.float32)


@dataclasses.dataclass(frozen=True)
class Failure:
    """A model with its loss and optimizer."""

    model: dict[str, Any]
    loss: Callable[..., Any]
    optimizer: Callable[[], optax.GradientTransformation] = lambda: optax.adam(1e-2)
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)


def _twins(optimizer: Callable[[], optax.GradientTransformation], **settings: Any) -> Failure:
    """Two leaves of one shape, whose updates XLA fuses."""

    def loss(model: Any, batch: Any, key: Any) -> Any:
        x = batch["x"]
        return (x @ model["a"] + jnp.tanh(x @ model["c"]) - batch["y"]) ** 2

    model = {"a": normal(FEATURES), "c": normal(FEATURES) / 2}
    return Failure(model, loss, optimizer, settings)


def _mlp(model: Any, batch: Any, key: Any) -> Any:
    hidden = jnp.tanh(batch["x"] @ model["in"] + model["b"])
    return (hidden @ model["out"] - batch["y"]) ** 2


def _experts(model: Any, batch: Any, key: Any) -> Any:
    best, which = lax.top_k(jax.nn.softmax(batch["x"] @ model["gate"]), 2)
    out = jnp.einsum("nk,nd,nkd->n", best, batch["x"], model["w"][which])
    return (out - batch["y"]) ** 2, {"best": best[:, 0]}


def _half(model: Any, batch: Any, key: Any) -> Any:
    x = batch["x"]
    low = (x.astype(jnp.bfloat16) @ model["half"]).astype(jnp.float32)
    return (x @ model["a"] + jnp.tanh(low) + x @ model["b"] - batch["y"]) ** 2


def _scales(model: Any, batch: Any, key: Any) -> Any:
    x = batch["x"]
    out = jnp.tanh(x @ model["a"]) + 1e-12 * (x @ model["small"]) + 1e9 * (x @ model["large"])
    return (out - batch["y"]) ** 2


def _unit(model: Any, batch: Any, key: Any) -> Any:
    f = jnp.tanh(batch["x"] @ model["in"]) @ model["out"]
    unit = f / jnp.linalg.norm(f, axis=-1, keepdims=True)
    return jnp.sum((unit - batch["y"][:, None]) ** 2, -1), {"unit": jnp.sum(unit, -1)}


def _widening() -> optax.GradientTransformation:
    """Momentum that starts in the dtype of the parameters and is float32 after a step."""

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        state = jax.tree.map(lambda m, u: 0.9 * m.astype(jnp.float32) + u, state, updates)
        return state, state

    return optax.GradientTransformation(lambda params: jax.tree.map(jnp.zeros_like, params), update)


MLP = {"in": normal(FEATURES, 16), "b": np.zeros(16, np.float32), "out": normal(16)}
HALF = {
    "a": normal(FEATURES),
    "b": normal(FEATURES) / 3,
    "half": jnp.asarray(normal(FEATURES) / 2, jnp.bfloat16),
}
SCALES = {"a": normal(FEATURES), "small": normal(FEATURES), "large": normal(FEATURES) / 1e9}

FAILURES = {
    "twins, momentum": _twins(lambda: optax.sgd(0.05, momentum=0.9)),
    "twins, adam": _twins(lambda: optax.adam(1e-2)),
    "twins, adamw": _twins(lambda: optax.adamw(1e-2, weight_decay=0.1)),
    "twins, adamw, zero1": _twins(lambda: optax.adamw(1e-2), layout="zero1"),
    "twins, rmsprop": _twins(lambda: optax.rmsprop(1e-2)),
    "twins, lamb": _twins(lambda: optax.lamb(1e-2)),
    "twins, clipped": _twins(lambda: optax.chain(optax.clip_by_global_norm(0.1), optax.adam(1e-2))),
    "twins, schedule": _twins(lambda: optax.adam(optax.cosine_decay_schedule(1e-2, 8))),
    "twins, average": _twins(lambda: optax.adam(1e-2), ema=0.9),
    "multi-steps": Failure(
        MLP, _mlp, lambda: optax.MultiSteps(optax.adam(1e-2), 2).gradient_transformation()
    ),
    "widening": Failure(HALF, _half, lambda: optax.chain(optax.adam(1e-2), _widening())),
    "experts": Failure({"gate": normal(FEATURES, 4), "w": normal(4, FEATURES)}, _experts),
    "bfloat16 leaf": Failure(HALF, _half),
    "scales": Failure(SCALES, _scales, lambda: optax.sgd(1e-20, momentum=0.9)),
    "scales, adam": Failure(SCALES, _scales),
    "unit": Failure({"in": normal(FEATURES, 16), "out": normal(16, 3)}, _unit),
}


def trained(failure: Failure, devices: int) -> tuple[str, list[str], dict[str, float]]:
    """Digests of the state after six steps and of each step's metrics, and the evaluation."""
    settings = {"mode": "exact", "devices": devices, "micro_shards": 8, **failure.settings}
    dp = parallel(failure.loss, failure.optimizer(), **settings)
    state, told = dp.init(failure.model), []
    for batch in epochs(dp, rows(), ROWS, STEPS, shuffle=True):
        state, metrics = dp.step(state, batch)
        told.append(sha256(metrics))
    return sha256(state), told, dp.evaluate(state, dp.feed(rows(), ROWS))


@pytest.mark.promise("exact.every-optimizer")
@pytest.mark.parametrize("name", only(["widening"], FAILURES))
def test_the_same_bits(name: str) -> None:
    failure = FAILURES[name]
    assert trained(failure, 2) == trained(failure, 1)
    assert trained(failure, 8) == trained(failure, 1)


def test_a_guarded_update_in_pieces_of_any_dim() -> None:
    """Crashed on two devices: results of the guard's branch were sharded along dim 0."""

    def loss(model: Any, batch: Any, key: Any) -> Any:
        return jnp.sum(jnp.tanh(batch["x"][:, :3] @ model["w"]) ** 2, -1)

    found = []
    for devices in (1, 2):
        optimizer = optax.chain(optax.clip_by_global_norm(0.1), optax.adam(1e-2))
        dp = parallel(loss, optimizer, devices=devices, mode="exact", layout="zero1")
        state = with_losses(dp.init({"w": normal(3, 24)}))
        dp = guarded(dp, state)
        for _ in range(2):
            state, _ = dp.step(state, {"x": rows()["x"]})
        found.append(sha256(state))
    assert found[0] == found[1]


def test_a_number_in_the_state_is_placed_as_an_array_is() -> None:
    dp = rx.DataParallel(_half, optax.sgd(1e-2), mode="exact")
    state, _ = dp.step(dp.init(HALF), rows())
    placed, counted = (dp.step(each, rows())[0] for each in _copies_at(state, 7))
    assert int(counted.step) == 8
    assert sha256(counted) == sha256(placed)


def _copies_at(state: Any, step: int) -> list[Any]:
    """The state at `step`, once with an array and once with a number."""
    return [
        dataclasses.replace(jax.tree.map(jnp.copy, state), step=each)
        for each in (jnp.asarray(step, jnp.int32), step)
    ]
