"""The gradient is the derivative, and linear in its cotangent; rules of other kinds are named."""

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.training import normals

from replicax.verify.gradient_checks import GradientChecks, difference_in_direction
from replicax.verify.own_rules import rules_in, without

draw = normals(0)
PARAMS, X = {"w": jnp.asarray(draw(3))}, draw(16, 3)


def ruled(function: Any, back: Any) -> Any:
    found = jax.custom_vjp(function)
    found.defvjp(lambda x: (function(x), x), lambda x, g: (back(x, g),))
    return found


def kernel(x: Any) -> Any:
    return jnp.tanh(x) * x


def slope(x: Any) -> Any:
    return jnp.tanh(x) + x * (1 - jnp.tanh(x) ** 2)


def same(x: Any) -> Any:
    return x


def reference(function: Any) -> Any:
    """Return a stand-in for a `PlainStep` of the mean of `function`."""

    def mean(_state: Any, _batch: Any, params: Any) -> Any:
        def part(params: Any, x: Any) -> Any:  # rules are found inside of loops
            return params, jnp.sum(function(x @ params["w"]))

        return jax.lax.scan(part, params, X.reshape(2, 8, 3))[1].sum() / 16

    def gradient(state: Any, batch: Any, times: float) -> Any:
        return jax.grad(lambda params: times * mean(state, batch, params))(state.params), {}, ()

    subject = SimpleNamespace(
        state=SimpleNamespace(params=PARAMS, scale=()), full=None, quick=None, eps=2.0**-23
    )
    subject.scored = jax.make_jaxpr(lambda params: mean(None, None, params))(PARAMS)
    return SimpleNamespace(subject=subject, mean=mean, gradient=gradient, given=lambda batch: batch)


KINDS = {
    "the derivative": (kernel, lambda x, g: g * slope(x), ["pass", "pass"]),
    "twice the derivative": (kernel, lambda x, g: 2 * g * slope(x), ["fail", "pass"]),
    "ignores its cotangent": (kernel, lambda x, g: slope(x), ["fail", "fail"]),
    "straight through": (lambda x: jnp.round(x), lambda x, g: g, ["note", "pass"]),
    "reversed": (same, lambda x, g: -g, ["note", "pass"]),
    "clipped": (same, lambda x, g: jnp.clip(g, -0.05, 0.05), ["note", "note"]),
    "as it is": (same, lambda x, g: g, ["pass", "pass"]),
}


@pytest.mark.parametrize("name", KINDS)
def test_rules_are_judged_by_kind(name: str) -> None:
    function, back, verdicts = KINDS[name]
    checks = [*GradientChecks(reference(ruled(function, back)), ()).checks()]
    assert [check.verdict for check in checks] == verdicts
    if verdicts[0] == "fail":
        assert checks[0].figures["function"] == "kernel"
        assert checks[0].figures["file"] == __file__


def test_a_declared_one_is_no_failure() -> None:
    broken = reference(ruled(kernel, lambda x, g: slope(x)))
    checks = [*GradientChecks(broken, ["kernel"]).checks()]
    assert [check.verdict for check in checks] == ["note", "note"]


@pytest.mark.parametrize("function", [jax.nn.relu, lambda x: x + jax.lax.stop_gradient(x**2)])
def test_rules_of_libraries_and_stopped_gradients_are_no_rules(function: Any) -> None:
    checks = [*GradientChecks(reference(function), ()).checks()]
    assert [check.verdict for check in checks] == ["pass", "pass"]


def test_a_program_without_a_rule_has_jaxs_derivative() -> None:
    wrong = ruled(kernel, lambda x, g: 0 * g)
    jaxpr = jax.make_jaxpr(lambda x: jax.jit(lambda x: wrong(x) + jnp.sin(x))(x))(1.0)
    (rule,) = rules_in(jaxpr)
    found = jax.grad(lambda x: without(jaxpr, rule)(x)[0])(1.0)
    np.testing.assert_allclose(found, slope(1.0) + np.cos(1.0), rtol=1e-6)


@pytest.mark.parametrize(("factor", "apart"), [(1.0, False), (1.1, True), (-1.0, True)])
def test_what_jax_cannot_differentiate_is_compared_in_a_direction(
    factor: float, apart: bool
) -> None:
    def on_host(x: Any) -> Any:
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return jax.pure_callback(lambda x: np.sin(x), shape, x, vmap_method="sequential")

    function = ruled(on_host, lambda x, g: factor * g * jnp.cos(x))
    check, _ = GradientChecks(reference(function), ()).checks()
    assert (check.verdict == "fail") == apart


def test_a_small_leaf_counts_as_much_as_a_large_one() -> None:
    params = {"large": np.float32(1.0), "small": np.float32(1.0)}
    mean = lambda p: 1e3 * p["large"] ** 2 + p["small"] ** 2  # noqa: E731
    right = {"['large']": np.array(2e3), "['small']": np.array(2.0)}
    assert difference_in_direction(mean, params, right, 2.0**-23) == 0
    assert difference_in_direction(mean, params, {**right, "['small']": np.array(4.0)}, 1e-9) > 0.1
