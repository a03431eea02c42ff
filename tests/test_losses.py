"""Cross-entropy against its textbook form, in value and gradient: float32, bfloat16, padded."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.tiers import only

from replicax.core.ground.traced_for import traced_for
from replicax.losses import cross_entropy, linear_cross_entropy

ROWS, CLASSES, WIDTH = 24, 157, 16
LABELS = np.random.default_rng(1).integers(0, CLASSES, ROWS)
WEIGHTS = np.random.default_rng(2).uniform(size=ROWS).astype(np.float32)
"""Weights of the rows, of which one is padding."""
WEIGHTS[3] = 0


def textbook(logits: jax.Array) -> jax.Array:
    wide = logits.astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(wide, jnp.asarray(LABELS))


def weighed(loss: Any, *arguments: jax.Array) -> tuple[jax.Array, Any]:
    def total(*arguments: jax.Array) -> jax.Array:
        return jnp.sum(WEIGHTS * loss(*arguments))

    return jax.value_and_grad(total, tuple(range(len(arguments))))(*arguments)


def largest_error(found: Any, wanted: Any) -> float:
    """As a share of the largest value."""
    wanted = np.asarray(wanted, np.float64)
    return float(np.abs(np.asarray(found, np.float64) - wanted).max() / np.abs(wanted).max())


def logits(dtype: Any, deviation: float = 4.0) -> jax.Array:
    drawn = np.random.default_rng(0).normal(size=(ROWS, CLASSES)) * deviation
    return jnp.asarray(drawn, dtype)


def in_float64(logits: jax.Array) -> np.ndarray[Any, Any]:
    """Return the gradient of the weighted sum by the formula."""
    wide = np.asarray(logits, np.float64)
    exponentials = np.exp(wide - wide.max(-1, keepdims=True))
    chances = exponentials / exponentials.sum(-1, keepdims=True)
    chances[np.arange(ROWS), LABELS] -= 1
    return WEIGHTS[:, None].astype(np.float64) * chances


def test_in_float32_it_is_the_textbooks() -> None:
    given = logits(jnp.float32)
    (value, (gradient,)) = weighed(lambda x: cross_entropy(x, jnp.asarray(LABELS)), given)
    (wanted, (d_wanted,)) = weighed(textbook, given)
    assert abs(value - wanted) <= 1e-6 * abs(wanted)
    assert largest_error(gradient, d_wanted) <= 1e-6
    assert not np.asarray(gradient)[3].any()


@pytest.mark.parametrize("deviation", [0.1, 4.0, 40.0])
def test_in_bfloat16_it_is_no_worse_than_the_textbooks(deviation: float) -> None:
    given = logits(jnp.bfloat16, deviation)
    (value, (gradient,)) = weighed(lambda x: cross_entropy(x, jnp.asarray(LABELS)), given)
    (wanted, (textbooks,)) = weighed(textbook, given)
    assert gradient.dtype == jnp.bfloat16
    assert value.dtype == jnp.float32
    assert abs(value - wanted) <= 1e-6 * abs(wanted)
    exact = in_float64(given)
    assert largest_error(gradient, exact) <= largest_error(textbooks, exact) <= 2**-8


def test_its_backward_pass_keeps_no_float32_logits() -> None:
    given = logits(jnp.bfloat16)
    _, pullback = jax.vjp(lambda x: cross_entropy(x, jnp.asarray(LABELS)), given)
    kept = [leaf for leaf in jax.tree.leaves(pullback) if getattr(leaf, "size", 0) == given.size]
    assert [leaf.dtype for leaf in kept] == [jnp.bfloat16]


def test_a_class_that_cannot_be_has_no_gradient() -> None:
    given = logits(jnp.float32).at[:, -5:].set(-jnp.inf)
    labels = jnp.asarray(LABELS % (CLASSES - 5))
    value, (gradient,) = weighed(lambda x: cross_entropy(x, labels), given)
    wanted, _ = weighed(lambda x: cross_entropy(x, labels), given[:, :-5])
    assert value == wanted
    assert not np.asarray(gradient)[:, -5:].any()


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_filled_up_classes_change_nothing(dtype: Any) -> None:
    random = np.random.default_rng(3)
    hidden = jnp.asarray(random.normal(size=(ROWS, WIDTH)), dtype)
    weights = jnp.asarray(random.normal(size=(CLASSES, WIDTH)), dtype)

    def found(capability: float | None) -> tuple[jax.Array, Any, str]:
        def loss(*arguments: jax.Array) -> jax.Array:
            return linear_cross_entropy(*arguments, jnp.asarray(LABELS))

        with traced_for(capability):
            text = str(jax.make_jaxpr(loss)(hidden, weights))
            return *weighed(loss, hidden, weights), text

    value, gradients, text = found(None)
    filled, d_filled, filled_text = found(9.0)
    assert f"[{ROWS},192]" in filled_text
    assert f"[{ROWS},192]" not in text
    assert abs(filled - value) <= 1e-6 * abs(value)
    for one, other in zip(d_filled, gradients, strict=True):
        assert one.shape == other.shape
        assert largest_error(one, other) <= (1e-6 if dtype == jnp.float32 else 2**-7)


def linear_inputs(dtype: Any, scale: float) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return rows, weights and labels; every second row is as sure of its label as it can be."""
    random = np.random.default_rng(4)
    hidden = jnp.asarray(random.normal(size=(ROWS, WIDTH)), dtype)
    weights = jnp.asarray(random.normal(size=(CLASSES, WIDTH)) * scale, dtype)
    likeliest = np.asarray(hidden @ weights.T).argmax(-1)
    return hidden, weights, jnp.asarray(np.where(np.arange(ROWS) % 2, LABELS, likeliest))


@pytest.mark.parametrize(
    ("dtype", "bound"), [(jnp.float32, 5e-6), (jnp.bfloat16, 2**-7), (jnp.float16, 2**-10)]
)
@pytest.mark.parametrize("scale", only([1.0], [0.1, 1.0, 10.0]))
def test_on_cuda_it_is_as_exact_as_from_the_logits(dtype: Any, bound: float, scale: float) -> None:
    hidden, weights, labels = linear_inputs(dtype, scale)
    with traced_for(9.0):
        value, gradients = weighed(
            lambda *given: linear_cross_entropy(*given, labels), hidden, weights
        )
    # Of the logits as they are, rounded to their dtype.
    given = np.asarray(hidden @ weights.T, np.float64)
    shifted = given - given.max(-1, keepdims=True)
    total = np.exp(shifted).sum(-1)
    nats = np.log(total) - shifted[np.arange(ROWS), labels]
    assert value == pytest.approx((WEIGHTS * nats).sum(), rel=2e-6)
    spread = np.exp(shifted) / total[:, None]
    spread[np.arange(ROWS), labels] -= 1
    spread *= WEIGHTS[:, None]
    wanted = spread @ np.asarray(weights, np.float64), spread.T @ np.asarray(hidden, np.float64)
    for found, exact in zip(gradients, wanted, strict=True):
        assert found.dtype == dtype
        assert largest_error(found, exact) <= bound


def test_on_cuda_its_second_derivative_is_that_of_the_textbook() -> None:
    hidden, weights, labels = linear_inputs(jnp.float32, 1.0)

    def sharpness(hidden: jax.Array) -> jax.Array:
        slope = jax.grad(lambda x: jnp.sum(linear_cross_entropy(x, weights, labels)))
        return jnp.sum(slope(hidden) ** 2)

    wanted = jax.grad(sharpness)(hidden)
    with traced_for(9.0):
        assert largest_error(jax.grad(sharpness)(hidden), wanted) <= 1e-5


def test_on_cuda_the_logits_are_kept_once_and_only_for_two_products() -> None:
    hidden, weights, labels = linear_inputs(jnp.bfloat16, 1.0)
    with traced_for(9.0):
        _, pullback = jax.vjp(lambda *given: linear_cross_entropy(*given, labels), hidden, weights)
        text = str(jax.make_jaxpr(pullback)(jnp.ones(ROWS)))
    whole = f"[{ROWS},192]"
    kept = [leaf for leaf in jax.tree.leaves(pullback) if jnp.shape(leaf) == (ROWS, 192)]
    assert [leaf.dtype for leaf in kept] == [jnp.bfloat16]
    assert f":f32{whole}" not in text
    assert "exp" not in text


def test_in_float16_more_classes_than_its_largest_number_are_no_infinity() -> None:
    hidden, weights = jnp.ones((1, 2), jnp.float16), jnp.zeros((70_000, 2), jnp.float16)
    with traced_for(9.0):
        loss = jax.grad(lambda *given: linear_cross_entropy(*given, jnp.array([3]))[0], (0, 1))
        d_hidden, d_weights = loss(hidden, weights)
    assert not d_hidden.any()
    assert d_weights[3, 0] == -1
    assert jnp.isfinite(d_weights).all()
