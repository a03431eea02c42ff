"""Encoded gradients between islands: the sum of all, and what is kept for the next step."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import replicax as rx
from replicax.core.between.every_step import CodedSums
from replicax.core.ground.codecs import CODECS
from replicax.core.step.base import StepSums
from replicax.core.step.loss import LOSS, WeightedSum


class Twin:
    """A job with another island that sends the same, unless it has something `else_`."""

    def __init__(self, else_: np.ndarray | None = None) -> None:
        self._else = else_

    def share(self, arrays: list[np.ndarray], *, later: bool = False) -> Any:
        other = arrays if self._else is None else [self._else, arrays[1]]
        return lambda: [arrays, other]


def sums(gradient: np.ndarray) -> Any:
    weighted = {LOSS: WeightedSum(jnp.float32(6), jnp.float32(3))}
    return StepSums({"w": jnp.asarray(gradient)}, weighted), [], jnp.ones(())


def test_the_sum_of_all_islands_and_what_was_not_sent() -> None:
    gradient = np.random.default_rng(0).normal(size=64).astype(np.float32)
    add = CodedSums(CODECS["int4"], rx.make_mesh(1), Twin())
    (total, _, count), left = add(sums(gradient), jnp.zeros(64))
    np.testing.assert_allclose(total.gradient["w"] / 2 + left, gradient, atol=1e-6)
    assert np.abs(left).max() <= CODECS["int4"].error * np.abs(gradient).max()
    assert (float(total.weighted[LOSS].total), float(total.weight), float(count)) == (12, 6, 2)


@pytest.mark.parametrize("whose", ["own", "another's"])
def test_a_step_whose_gradient_is_not_finite_is_not_remembered(whose: str) -> None:
    codec, broken, before = CODECS["int8"], np.full(64, np.nan, np.float32), jnp.full(64, 0.5)
    gradient = broken if whose == "own" else np.linspace(0, 1, 64, dtype=np.float32)
    job = Twin(np.asarray(codec.encode(jnp.asarray(broken))))
    (total, *_), left = CodedSums(codec, rx.make_mesh(1), job)(sums(gradient), before)
    assert not np.any(np.isfinite(total.gradient["w"]))
    np.testing.assert_array_equal(left, before)
