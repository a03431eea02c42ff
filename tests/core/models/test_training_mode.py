"""Training mode in steps, inference mode in evaluation and of what comes back: NNX and Equinox."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from support.training import assert_near

import replicax as rx

BATCH = {"x": np.random.default_rng(0).normal(size=(8, 3, 4)).astype(np.float32)}


class Attending(nnx.Module):
    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(2, 4, dropout_rate=0.5, decode=False, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.drop(self.attention(self.norm(x)))


def nnx_modes(model: Any) -> list[Any]:
    parts = model.attention, model.drop
    return [model.norm.use_running_average, *(part.deterministic for part in parts)]


def module() -> Any:
    linear = eqx.nn.Linear(4, 4, key=jax.random.key(0))
    return [eqx.nn.Dropout(0.5), linear, eqx.nn.Dropout(0.5)]


def equinox_modes(model: Any) -> list[Any]:
    return [model[0].inference, model[2].inference]


def parallel(seen: list[Any], modes: Callable[[Any], list[Any]]) -> rx.DataParallel:
    """Return one whose loss notes the modes that it sees, and whether it has a key."""

    def loss(model: Any, batch: Any, key: Any) -> Any:
        seen.append((key is not None, modes(model)))
        if isinstance(model, nnx.Module):
            return jnp.mean(model(batch["x"]) ** 2, (1, 2))
        rows = jax.vmap(jax.vmap(model[1]))(model[0](batch["x"], key=key))
        return jnp.mean(model[2](rows, key=key) ** 2, (1, 2))

    return rx.DataParallel(loss, optax.sgd(0.1))


@pytest.mark.parametrize(
    ("make", "modes"), [(Attending, nnx_modes), (module, equinox_modes)], ids=["nnx", "equinox"]
)
def test_the_mode_is_set_in_steps_in_evaluation_and_in_what_comes_back(
    make: Callable[[], Any], modes: Callable[[Any], list[Any]]
) -> None:
    given, seen = make(), list[Any]()
    before = modes(given)
    dp = parallel(seen, modes)
    state, _ = dp.step(dp.init(given), BATCH)
    dp.evaluate(state, BATCH)
    back = dp.model(state)
    dp.step(dp.init(back), BATCH)  # of the same structure, in training mode again
    count = len(before)
    for trains, found in seen:
        assert found == [not trains] * count
    assert {trains for trains, _ in seen} == {True, False}
    assert modes(back) == [True] * count
    assert modes(given) == before
    other = parallel(again := [], modes)
    other.step(other.init(back), BATCH)
    assert (True, [False] * count) in again


def test_parts_in_inference_mode_are_refused_by_name() -> None:
    net = Attending()
    net.norm.eval()
    with pytest.raises(rx.errors.ConfigError, match=r"norm\.use_running_average.*deterministic"):
        parallel([], nnx_modes).init(net)
    parts = module()
    parts[0] = eqx.nn.inference_mode(parts[0])
    with pytest.raises(rx.errors.ConfigError, match=r"0\.inference.*2\.inference"):
        parallel([], equinox_modes).init(parts)


def test_a_part_is_kept_in_inference_mode_by_the_loss() -> None:
    def loss(model: Any, batch: Any, key: Any) -> Any:
        model.norm.eval()
        return jnp.mean(model(batch["x"]) ** 2, (1, 2))

    dp = rx.DataParallel(loss, optax.sgd(0.1))
    state = dp.init(Attending())
    before = jax.tree.map(np.array, state.extras["norm"])
    state, _ = dp.step(state, BATCH)
    assert_near(state.extras["norm"], before, rtol=0, atol=0)


def test_a_part_may_refuse_training_itself() -> None:
    class Frozen(Attending):
        def train(self, **attributes: Any) -> None:
            super().train(**attributes)
            self.norm.eval()

    net, seen = Frozen(), list[Any]()
    net.train()
    dp = parallel(seen, nnx_modes)
    dp.step(dp.init(net), BATCH)
    assert seen[0] == (True, [True, False, False])
