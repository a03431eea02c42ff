"""`rx.Rounds`: defaults, what is due when, and what is refused."""

from typing import Any

import jax.numpy as jnp
import optax
import pytest
from support.rounds import MODEL, assert_close, on, over, squared, train

import replicax as rx
from replicax.core.between.rounds import OuterSGD
from replicax.errors import ConfigError


@pytest.mark.parametrize(
    ("islands", "send", "rate", "momentum", "decay"),
    [
        (1, "float32", 0.5, 0.9, 1.0),
        (2, "int4", 0.6, 0.9, 1.0),
        (4, "int8", 0.6, 0.9, 1.0),
        (8, "bfloat16", 0.8, 0.9, 1.0),
        (8, "sparse", 1.0, 0.0, 0.95),
    ],
)
def test_defaults(islands: int, send: str, rate: float, momentum: float, decay: float) -> None:
    found = rx.Rounds(send=send).resolved(islands)
    assert isinstance(found.outer, OuterSGD)
    assert (found.outer.rate, found.outer.momentum, found.decay) == (rate, momentum, decay)
    assert rx.Rounds(send=send, decay=0.5).resolved(islands).decay == 0.5


def test_what_is_due_and_when_a_run_may_stop() -> None:
    rounds = rx.Rounds(6, fragments=3, delay=1)
    assert [rounds.due(step) for step in range(1, 9)] == [None, 1, None, 2, None, 0, None, 1]
    assert [step for step in range(10) if rounds.is_boundary(step)] == [1, 3, 5, 7, 9]


def test_names_tell_outer_optimizers_apart() -> None:
    one, same, other = (
        rx.Rounds(outer=optax.sgd(rate)).resolved(1).names() for rate in (0.5, 0.5, 0.6)
    )
    assert one == same
    assert one["outer"] != other["outer"]


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({"every": 30, "fragments": 4}, ["every=30", "fragments=4"]),
        ({"every": 30, "fragments": 3, "delay": 10}, ["delay=10", "9"]),
        ({"delay": -1}, ["delay=-1"]),
        ({"mix": 1.5}, ["mix=1.5"]),
        ({"axis": "model"}, ["axis='model'", "'data'"]),
        ({"send": "int5"}, ["int5", "int4"]),
        ({"every": 0}, ["every", "0"]),
        ({"every": 1, "decay": 0.9}, ["every=1", "decay=0.9"]),
        ({"every": 1, "mix": 0.5}, ["every=1", "mix=0.5"]),
    ],
)
def test_refused(settings: dict[str, Any], names: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        rx.Rounds(**settings)
    assert "\n" not in str(error.value)
    assert [name for name in names if name not in str(error.value)] == []


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({"mode": "jit"}, ["mode='jit'", "shard_map"]),
        ({"layout": "zero1"}, ["zero1", "replicated"]),
        ({"ema": 0.9}, ["ema=0.9"]),
    ],
)
def test_refused_by_a_step(settings: dict[str, Any], names: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        on(2, over(2), **settings)
    assert "\n" not in str(error.value)
    assert [name for name in names if name not in str(error.value)] == []


def test_complex_parameters_travel_as_two_numbers() -> None:
    def modulus(model: Any, batch: Any, key: Any) -> Any:
        return jnp.abs(batch["x"] @ model["w"] - batch["y"][:, :2]).sum(-1) ** 2

    model = {"w": jnp.ones((8, 2), jnp.complex64) * (1 + 2j)}
    wanted, _ = train(on(1, loss=modulus, optimizer=optax.sgd(1e-3)), model, steps=4)
    dp = on(1, over(2), loss=modulus, optimizer=optax.sgd(1e-3))
    found, _ = train(dp, model, steps=4)
    assert_close(found.params, wanted.params)
    assert dp.program(found).step.arithmetic.payload_bytes(model) == 4 * 64


def test_a_loss_that_gathers_rows_is_refused() -> None:
    def contrastive(model: Any, batch: Any, key: Any) -> Any:
        hidden = jnp.tanh(batch["x"] @ model["a"])
        return (hidden @ rx.gather(hidden).T).sum(-1) + squared(model, batch, key)

    dp = on(2, over(2), loss=contrastive)
    state = dp.init(MODEL)
    with pytest.raises(rx.ReplicaxError) as error:
        dp.step(state, {"x": jnp.ones((8, 8)), "y": jnp.ones((8, 8))})
    assert "\n" not in str(error.value)
    assert "gather" in str(error.value)
