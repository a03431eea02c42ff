"""The reprs of objects in a debugger or a notebook: one line, and they never wait or fail."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import replicax as rx

MODEL = {"w": jnp.ones((300, 100)), "b": jnp.ones(100)}


def loss(model: Any, batch: Any, key: Any) -> Any:
    return jnp.sum((batch["x"] @ model["w"] + model["b"]) ** 2, axis=1)


def rows(count: int) -> dict[str, np.ndarray]:
    return {"x": np.ones((count, 300), np.float32)}


def mesh(devices: int) -> jax.sharding.Mesh:
    return rx.make_mesh(devices=jax.devices()[:devices])


def custom_step(state: Any, batch: Any, key: Any) -> Any:
    return state, {"loss": rx.mean(batch["x"][:, 0])}


def test_a_custom_step_is_named() -> None:
    dp = rx.DataParallel(step=custom_step, mesh=mesh(2))
    assert repr(dp) == "DataParallel(mode='jit', layout='replicated', step='custom_step', 2 x cpu)"


def test_a_state_says_where_it_stands_and_what_it_takes() -> None:
    dp = rx.DataParallel(loss, optax.adam(1e-3), mesh=mesh(2))
    state = dp.init(MODEL)
    # 30,100 parameters and Adam's two moments of 4 bytes each; step, seed and Adam's count
    assert 3 * 4 * 30_100 + 12 == 361_212
    jax.block_until_ready(state)
    assert repr(state) == "TrainState(step=0, 30,100 parameters, 0.4 MB)"
    after, _ = dp.step(state, rows(4))
    jax.block_until_ready(after)
    assert repr(after) == "TrainState(step=1, 30,100 parameters, 0.4 MB)"
    assert repr(state) == "TrainState(step=?, 30,100 parameters, 0.4 MB)"  # given to the step
    small = dataclasses.replace(after, params=after.params["b"], opt_state=(), seed=after.step)
    assert repr(small) == "TrainState(step=1, 100 parameters, 408 bytes)"


def test_a_state_of_anything_else_can_be_shown() -> None:
    dp = rx.DataParallel(loss, optax.sgd(0.1), mesh=mesh(2))
    state = dp.init(MODEL)
    assert repr(dp.abstract_state(MODEL)) == "TrainState(step=?, 30,100 parameters, 0.1 MB)"
    shardings = jax.tree.map(lambda leaf: leaf.sharding, state)
    assert repr(shardings) == "TrainState(4 leaves: NamedSharding)"
    names = jax.tree.map(str, dataclasses.replace(state, seed=None))
    assert repr(names) == "TrainState(3 leaves: str)"
    seen = []
    jax.eval_shape(lambda state: seen.append(repr(state)), state)
    assert seen == ["TrainState(step=?, 30,100 parameters, 0.1 MB)"]


class Unfinished:
    """A fake step counter that the devices are still computing."""

    dtype, shape = np.dtype(np.int32), ()

    def is_ready(self) -> bool:
        return False

    def __int__(self) -> int:
        raise AssertionError("a repr has waited for the devices")


def test_a_state_that_is_being_computed_is_not_waited_for() -> None:
    state = rx.TrainState(Unfinished(), {"w": np.ones(3, np.float32)}, (), {}, Unfinished())
    assert repr(state) == "TrainState(step=?, 3 parameters, 20 bytes)"


def batches() -> Iterator[dict[str, np.ndarray]]:
    yield rows(4)


def test_a_feed_says_how_much_it_gives() -> None:
    dp = rx.DataParallel(loss, optax.sgd(0.1), mesh=mesh(2))
    assert repr(dp.feed(rows(1000), 32, epoch=3)) == "Feed(1,000 rows in 32 batches of 32, epoch=3)"
    later = dp.feed(rows(1000), 32, first=5)
    assert repr(later) == "Feed(1,000 rows in 32 batches of 32, epoch=0, first=5)"
    assert repr(dp.feed(batches())) == "Feed(? rows in ? batches, epoch=0)"
    assert repr(dp.feed(batches(), 4)) == "Feed(? rows in ? batches of 4, epoch=0)"
