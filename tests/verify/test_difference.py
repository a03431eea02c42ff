"""Differences that rounding does not explain are found, and no others."""

import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.tiers import only

from replicax.verify.difference import (
    Difference,
    bounds,
    coarsest_eps,
    constant_ratio,
    leaf_differences,
    leaves,
    perturbed,
    rounding_noise,
    step_changes,
    stored_rounding,
)


def first_difference(*compared: Any) -> Difference | None:
    return next(iter(leaf_differences(*compared)), None)


EPS = float(np.finfo(np.float32).eps)
VALUES = {"a": np.array([1.0, -2.0, 4.0]), "b": np.array(3.0)}


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def test_names_the_first_leaf_and_its_worst_element() -> None:
    found = {"a": VALUES["a"] + [0, 0.5, 0.1], "b": VALUES["b"] + 1}
    difference = first_difference(found, VALUES, {"a": np.array(0.2), "b": np.array(0.2)})
    assert difference is not None
    assert (difference.path, difference.largest, difference.bound) == ("a", 0.5, 0.2)
    assert (difference.elements, difference.size, difference.scale) == (1, 3, 4.0)
    assert re.match(
        r"a differs by 1\.2e-01 .*\(bound 5\.0e-02, 1 of 3 elements\)$", str(difference)
    )


def test_no_ratio_where_there_is_none() -> None:
    assert constant_ratio(np.array([1.0, 2.0]), np.array([2.0, 1.0])) is None
    assert constant_ratio(np.array([1.0, 2.0]), np.array([0.0, 0.0])) is None


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (None, "is missing"),
        (np.zeros(2), "[2] where [3]"),
        (np.array([1.0, np.nan, 4.0]), "NaN or infinity"),
    ],
)
def test_differences_without_a_size_are_shown_in_words(found: Any, words: str) -> None:
    held = {} if found is None else {"a": found}
    difference = first_difference(held, {"a": VALUES["a"]}, {"a": np.array(1e9)})
    assert difference is not None
    assert words in str(difference)
    assert difference.to_json()["largest"] is None


def test_nan_where_nan_is_expected_is_no_difference() -> None:
    nan = {"a": np.array([np.nan, 1.0])}
    assert first_difference(nan, nan, {}) is None


def test_integers_have_to_be_equal() -> None:
    found, expected = {"n": np.array([1, 2])}, {"n": np.array([1, 3])}
    difference = first_difference(found, expected, {"n": np.array(9.0)})
    assert difference is not None
    assert "1 of 2 elements" in str(difference)


def test_leaves_are_named_by_path_and_keys_are_compared() -> None:
    tree = {"w": jnp.ones(2, jnp.bfloat16), "key": jax.random.key(1), "name": "x", "n": 3}
    found = leaves(tree)
    assert list(found) == ["['key']", "['n']", "['w']"]
    assert found["['w']"].dtype == np.float64
    assert found["['key']"].dtype == np.uint32


def test_a_change_of_a_float_is_what_was_added_in_float64() -> None:
    before = {"w": np.float32([1, 2]), "n": np.int32(4)}
    after = {"w": np.float32([1 + 1e-5, 2]), "n": np.int32(5), "loss": np.float32(7)}
    found = step_changes(before, after)
    assert found["['w']"][0] == pytest.approx(1e-5, rel=1e-2)
    assert found["['n']"] == 5
    assert found["['loss']"] == 7


def test_perturbed_moves_floats_by_their_size_and_leaves_zeros_and_labels() -> None:
    tree = {"w": normal(1, 100), "zero": np.zeros(3, np.float32), "n": np.arange(3)}
    moved = perturbed(tree, 0, 1e-3)
    share = np.abs(moved["w"] / tree["w"] - 1)
    assert share.min() > 0.9e-3
    assert share.max() < 1.1e-3
    assert not moved["zero"].any()
    assert (moved["n"] == tree["n"]).all()
    labels = {"y": np.float32([0, 3, 1])}
    assert (perturbed(labels, 0, 1e-3, whole=False)["y"] == labels["y"]).all()
    assert (perturbed(labels, 0, 1e-3)["y"] != labels["y"]).any()


def test_perturbed_moves_what_is_coarse_by_its_own_unit() -> None:
    coarse = jnp.asarray(normal(2, 50), jnp.bfloat16)
    assert (np.asarray(perturbed(coarse, 0, EPS)) != np.asarray(coarse)).all()


def test_the_coarsest_dtype_is_found_inside() -> None:
    def half(x: jax.Array) -> jax.Array:
        return (x.astype(jnp.bfloat16) * 2).astype(jnp.float32)

    x = jnp.ones(3)
    assert coarsest_eps(jax.jit(half), [x]) == 2.0**-7
    assert coarsest_eps(jax.jit(lambda x: x * 2), [x]) == EPS


# Rounding. Each function is computed on all rows, and as the mean over eight parts.


def network(params: Any, rows: Any) -> jax.Array:
    hidden = jax.nn.relu(rows["x"] @ params["in"])
    pooled = hidden.reshape(hidden.shape[0], -1, 2).max(-1)
    return jnp.mean((pooled @ params["out"] - rows["y"]) ** 2)


def attention(params: Any, rows: Any) -> jax.Array:
    """The gradient of the key's bias is 0 in exact arithmetic."""
    x = rows["x"].reshape(-1, 8, 8)
    key = x @ params["key"] + params["key_bias"]
    weights = jax.nn.softmax(x @ key.swapaxes(1, 2))
    return jnp.mean(((weights @ x).mean((1, 2)) - rows["y"]) ** 2)


ROWS = {"x": normal(3, 64, 64), "y": normal(4, 64)}
MODELS = {
    "network": (network, {"in": normal(5, 64, 128) / 8, "out": normal(6, 64) / 8}),
    "attention": (attention, {"key": normal(7, 8, 8), "key_bias": normal(8, 8)}),
}


def step(loss: Any, optimizer: Any, parts: int) -> Any:
    def run(params: Any, rows: Any) -> Any:
        cut = jax.tree.map(lambda leaf: leaf.reshape(parts, -1, *leaf.shape[1:]), rows)
        gradients = jax.lax.map(lambda part: jax.grad(loss)(params, part), cut)
        gradient = jax.tree.map(lambda leaf: jnp.mean(leaf, 0), gradients)
        updates, _ = optimizer.update(gradient, optimizer.init(params), params)
        return optax.apply_updates(params, updates), gradient

    compiled = jax.jit(run)
    return lambda params, rows: step_changes((params, params), compiled(params, rows))


@pytest.mark.promise("verify.no-false-alarm")
@pytest.mark.parametrize("optimizer", [optax.sgd(0.1), optax.adam(1e-3)], ids=["sgd", "adam"])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("seed", only([0], range(3)))
def test_rounding_is_no_difference_and_a_thousandth_is(
    name: str, optimizer: Any, seed: int
) -> None:
    loss, params = MODELS[name]
    rows = jax.tree.map(lambda leaf: np.roll(leaf, 5 * seed, 0) * np.float32(1 + seed / 7), ROWS)
    reference = step(loss, optimizer, 1)
    expected = reference(params, rows)
    limits = bounds(
        expected,
        rounding_noise(reference, params, rows, eps=EPS, expected=expected),
        terms=64,
        eps=EPS,
        stored=stored_rounding((params, params)),
    )
    apart = leaf_differences(step(loss, optimizer, 8)(params, rows), expected, limits)
    assert apart == []
    off = {path: value * 1.001 for path, value in expected.items()}
    assert {"[1]['in']", "[1]['key']"} & {
        each.path for each in leaf_differences(off, expected, limits)
    }


def test_elements_that_the_perturbed_runs_missed_are_rounding_too() -> None:
    expected = {"w": np.ones(20_000)}
    limit = np.full(20_000, 1e-6)
    limit[:50] = 2e-3  # of Adam's steps that a perturbed run turned
    for missed, found in ((2, None), (3, 3)):
        gap = np.zeros(20_000)
        gap[-missed:] = 1e-3
        difference = first_difference({"w": 1 + gap}, expected, {"w": limit})
        assert (difference and difference.elements) == found
    gap[-missed:] = [0, 0, 3e-3]
    assert first_difference({"w": 1 + gap}, expected, {"w": limit}) is not None


def test_noise_without_a_bound_on_size_is_none() -> None:
    """In bfloat16 a few units would be another model: the bound stops at one."""
    params = {"w": normal(9, 8)}
    noise = rounding_noise(
        lambda state, _: leaves({"w": state["w"]}), params, {}, eps=2.0**-7, expected=leaves(params)
    )
    assert float(noise["['w']"].max()) <= 1.1 * 2.0**-7 * float(np.abs(params["w"]).max())
    assert math.isfinite(float(noise["['w']"].max()))
