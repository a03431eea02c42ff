"""`rx.verify` of a custom step: correct ones pass, and mistakes get their fixes."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from support.tiers import EXHAUSTIVE
from support.training import normals, parallel

import replicax as rx
from replicax.text.checks import PASS, SKIP
from replicax.verify.verification import Verification

optimizer = optax.adam(1e-2)
draw = normals(0)
MODEL = {"w": jnp.asarray(draw(4, 2))}
STATE = {"model": MODEL, "moments": optimizer.init(MODEL)}
DATA = {"x": draw(32, 4), "y": draw(32, 2)}


def loss(model: Any, batch: Any, key: Any) -> Any:
    return jnp.sum((jnp.tanh(batch["x"] @ model["w"]) - batch["y"]) ** 2, -1)


def updated(state: Any, gradient: Any) -> Any:
    updates, moments = optimizer.update(gradient, state["moments"], state["model"])
    return {"model": optax.apply_updates(state["model"], updates), "moments": moments}


def step_of(loss: Any) -> Any:
    def step(state: Any, batch: Any, key: Any) -> Any:
        means, gradient = rx.value_and_grad(loss)(state["model"], batch, key)
        return updated(state, gradient), {**means, "y": rx.mean(batch["y"][:, 0])}

    return step


def by_hand(state: Any, batch: Any, key: Any) -> Any:
    gradient = jax.grad(lambda model: jnp.mean(loss(model, batch, key)))(state["model"])
    return updated(state, gradient), {"loss": rx.mean(loss(state["model"], batch, key))}


def draws(state: Any, batch: Any, key: Any) -> Any:
    after, means = step_of(loss)(state, batch, key)
    noise = 0.01 * jax.random.normal(key, MODEL["w"].shape)
    return {**after, "model": {"w": after["model"]["w"] + noise}}, means


def verified(step: Any, *modes: str, mode: str = "shard_map") -> Verification:
    dp = parallel(step=step, mode=mode, micro_shards=8)
    return rx.verify(dp, STATE, DATA, modes=modes, micro_batches=1)


def test_a_correct_step_passes(capsys: pytest.CaptureFixture[str]) -> None:
    found = verified(step_of(loss), "jit", "shard_map", "exact")
    assert {check.verdict for check in found.checks} == {PASS}
    cases = [check.case for check in found.checks if check.subject == "parity"]
    kinds = ("full batch", "2 steps", "unequal weights", "padded batch")
    assert cases == [
        *(f"{mode}, {kind}" for mode in ("jit", "shard_map", "exact") for kind in kinds),
        "exact, 1, 2, 4 devices",
    ]
    assert len(set(found.checks[-1].figures["sha256"].values())) == 1
    assert capsys.readouterr().out == ""


def weighted_mean(model: Any, batch: Any, key: Any) -> Any:
    weights = jnp.abs(batch["y"][:, 0])
    return jnp.sum(loss(model, batch, key) * weights) / jnp.sum(weights)


@pytest.mark.parametrize(
    ("step", "fix"),
    [
        (by_hand, r"state.model.w depends on rows .*: take rx\.mean of rows, rx\.value_and_grad"),
        (draws, r"state.model.w depends on the step's key.*: draw in a loss"),
        (step_of(weighted_mean), r" per row, as rx\.Weighted"),
    ],
)
def test_a_mistake_is_found_with_its_fix(step: Any, fix: str) -> None:
    (check,) = verified(step, "shard_map").failed
    assert check.case == "shard_map"


def dropout(model: Any, batch: Any, key: Any) -> Any:
    kept = jax.random.bernoulli(key, 0.5, batch["x"].shape)
    return loss(model, {**batch, "x": batch["x"] * kept}, key)


@EXHAUSTIVE
def test_random_numbers_of_each_replica_are_not_compared() -> None:
    found = verified(step_of(dropout), "shard_map")
    skipped = [check for check in found.checks if check.verdict != PASS]
    assert [check.verdict for check in skipped] == [SKIP] * 2
    assert "dropout rate 0" in skipped[0].found


def test_a_step_that_raises_is_a_row() -> None:
    (check,) = verified(lambda state, batch, key: state["no such"], "jit").failed
    assert (check.case, check.found) == ("one device", "KeyError: 'no such'")


@pytest.mark.parametrize("step", [by_hand, step_of(lambda m, b, k: jnp.mean(loss(m, b, k)))])
def test_a_mean_that_padding_would_change_is_not_padded(step: Any) -> None:
    found = verified(step, "jit", mode="jit")
    (check,) = (check for check in found.checks if check.verdict != PASS)
    assert check.verdict == SKIP
    assert check.case.split(" and ") == ["unequal weights", "padded batch"]
