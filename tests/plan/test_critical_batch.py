"""What a batch size costs, and the learning rates that it asks for."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replicax.errors import ConfigError
from replicax.plan.forecast import batch_cost, learning_rates

POSITIVE = st.floats(1e-3, 1e9)


def test_the_critical_batch_costs_twice_the_least_of_both() -> None:
    cost = batch_cost(512, 512)
    assert (cost.steps, cost.rows) == (2, 2)


def test_a_large_batch_saves_steps_and_wastes_rows() -> None:
    cost = batch_cost(4096, 1024)
    assert (cost.steps, cost.rows) == (1.25, 5)


@given(batch=POSITIVE, noise=POSITIVE)
def test_steps_and_rows_are_a_hyperbola(batch: float, noise: float) -> None:
    cost = batch_cost(batch, noise)
    assert (cost.steps - 1) * (cost.rows - 1) == pytest.approx(1, rel=1e-3)


def test_four_times_the_batch() -> None:
    rates = learning_rates(3e-4, 64, 256)
    assert rates.linear == pytest.approx(12e-4)
    assert rates.square_root == pytest.approx(6e-4)


@given(rate=POSITIVE, batch=POSITIVE)
def test_the_same_batch_keeps_its_rate(rate: float, batch: float) -> None:
    rates = learning_rates(rate, batch, batch)
    assert rates.linear == rates.square_root == rate


@pytest.mark.parametrize("noise", [0, -1, float("nan")])
def test_a_noise_scale_that_is_none(noise: float) -> None:
    with pytest.raises(ConfigError, match="positive"):
        batch_cost(8, noise)


def test_a_batch_without_rows() -> None:
    with pytest.raises(ConfigError, match="1 or more"):
        learning_rates(0.1, 64, 0)
