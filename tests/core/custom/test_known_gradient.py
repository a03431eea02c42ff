"""The loss of `rx.value_and_grad` has a known derivative: line searches and penalties on it."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.custom_step import loss, model, rows, state
from support.tiers import only
from support.training import assert_near, parallel

import replicax as rx

SEARCHING = optax.lbfgs()
PLACES = [("jit", 4), ("shard_map", 4), ("pmap", 2), ("exact", 2), ("single", 1)]


def searched(value: Any, value_and_grad: Any, state: Any) -> tuple[Any, Any]:
    """Return the state after a step of L-BFGS, whose line search calls `value`."""
    model = state["model"]
    found, gradient = value_and_grad(model)
    updates, searching = SEARCHING.update(
        gradient, state["searching"], model, value=found, grad=gradient, value_fn=value
    )
    return {"model": optax.apply_updates(model, updates), "searching": searching}, found


def with_replicax(state: Any, batch: Any, key: Any) -> tuple[Any, Any]:
    def of(model: Any) -> tuple[Any, Any]:
        means, gradient = rx.value_and_grad(loss)(model, batch, key)
        return means["loss"], gradient

    after, found = searched(lambda model: of(model)[0], of, state)
    return after, {"loss": found}


def plain(state: Any, batch: Any) -> tuple[Any, Any]:
    def of(model: Any) -> Any:
        return jnp.mean(loss(model, batch, None)[0])

    return searched(of, jax.value_and_grad(of), state)


@pytest.mark.parametrize(("mode", "devices"), only([("shard_map", 4)], PLACES))
def test_a_line_search_equals_that_on_one_device(mode: str, devices: int) -> None:
    begun = {"model": model(), "searching": SEARCHING.init(model())}
    batch = jax.tree.map(lambda leaf: leaf[:30], rows())
    dp = parallel(step=with_replicax, mode=mode, devices=devices)
    trained, other = dp.init(begun), begun
    for _ in range(3):
        trained, metrics = dp.step(trained, batch)
        other, expected = jax.jit(plain)(other, batch)
        np.testing.assert_allclose(metrics["loss"], expected, rtol=2e-6)
    assert not np.array_equal(other["model"]["w"], begun["model"]["w"])


def differentiated(of: Any) -> Any:
    def step(state: Any, batch: Any, key: Any) -> Any:
        found = jax.grad(lambda m: of(rx.value_and_grad(loss)(m, batch, key)))(state["model"])
        return state, {"loss": sum(map(jnp.sum, jax.tree.leaves(found)))}

    return step


@pytest.mark.parametrize("of", [lambda f: f[0]["size"], lambda f: optax.tree.norm(f[1])])
def test_the_derivative_of_anything_else_is_refused(of: Any) -> None:
    dp = rx.DataParallel(step=differentiated(of))
    begun = dp.init(state())
    with pytest.raises(rx.errors.LossError, match=r"means\['loss'\]"):
        dp.step(begun, rows())


def means_of(model: Any, batch: Any) -> Any:
    return rx.value_and_grad(loss)(model, batch)[0]["loss"]


def forward(model: Any, batch: Any) -> Any:
    return jax.jvp(lambda m: means_of(m, batch), (model,), (model,))[1]


def linear(model: Any, batch: Any) -> Any:
    return jax.linearize(lambda m: means_of(m, batch), model)[1](model)


def twice(model: Any, batch: Any) -> Any:
    return optax.tree.norm(jax.hessian(means_of)(model, batch))


@jax.custom_vjp
def halved(x: Any) -> Any:
    return x / 2


halved.defvjp(lambda x: (halved(x), None), lambda _, slope: (slope / 2,))


def of_anothers(model: Any, batch: Any) -> Any:
    return jax.jvp(halved, (jnp.float32(1),), (jnp.float32(1),))[1]


@pytest.mark.parametrize(
    ("of", "fix"),
    [
        (forward, r"jax\.jvp\(lambda"),
        (linear, r"jax\.jvp\(lambda"),
        (twice, "once"),
        (of_anothers, r"jax\.custom_jvp"),
    ],
)
def test_other_derivatives_of_it_are_one_line(of: Any, fix: str) -> None:
    def step(state: Any, batch: Any, key: Any) -> Any:
        return state, {"loss": of(state["model"], batch)}

    dp = rx.DataParallel(step=step)
    begun = dp.init(state())
    with pytest.raises(rx.errors.LossError, match=fix):
        dp.step(begun, rows())


def test_outside_of_a_step_they_are_too() -> None:
    with pytest.raises(rx.errors.LossError, match=r"jax\.jvp\(lambda"):
        forward(model(), rows())


def test_what_is_differentiated_forward_and_not_used_is_no_error() -> None:
    def step(state: Any, batch: Any, key: Any) -> Any:
        value, _ = jax.jvp(lambda m: means_of(m, batch), (state["model"],), (state["model"],))
        return state, {"loss": value}

    dp = rx.DataParallel(step=step)
    _, metrics = dp.step(dp.init(state()), rows())
    assert float(metrics["loss"]) == pytest.approx(float(means_of(model(), rows())))


def test_the_derivative_of_the_loss_is_its_gradient() -> None:
    found = jax.grad(lambda m: 3 * rx.value_and_grad(loss)(m, rows())[0]["loss"])(model())
    _, gradient = rx.value_and_grad(loss)(model(), rows())
    assert_near(found, jax.tree.map(lambda leaf: 3 * leaf, gradient), rtol=1e-6, atol=0)
