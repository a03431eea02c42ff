"""The initial model of a recipe: one program, whose bits are pinned, where it can be traced."""

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest

import replicax as rx
from replicax.cli import initial_model as module
from replicax.cli.initial_model import initial_model, model_program
from replicax.recipes.linear_regression import LinearRegression

BITS = [1007580928, 1026829632, 1050642048]


@dataclasses.dataclass(frozen=True)
class Drawn(LinearRegression):
    """Uniform numbers, which no compiler rounds, and normal ones."""

    needs_values: bool = False

    def model(self, key: jax.Array) -> Any:
        one, other = jax.random.split(key)
        drawn = jax.random.uniform(one, (3,))
        scale = float(drawn[0] > 0) if self.needs_values else 1.0
        return {"uniform": drawn, "normal": scale * jax.random.normal(other, (5,))}


def step(recipe: Drawn, devices: int = 1) -> rx.DataParallel:
    mesh = rx.make_mesh(devices=jax.devices()[:devices])
    return rx.DataParallel(recipe.loss, recipe.optimizer(), mesh=mesh)


def test_its_bits_are_pinned_and_follow_from_the_key_alone() -> None:
    recipe = Drawn()
    one, two = (initial_model(step(recipe, devices), recipe, 3) for devices in (1, 2))
    jax.tree.map(np.testing.assert_array_equal, one, two)
    assert np.asarray(one["uniform"]).view(np.uint32).tolist() == BITS
    by_operations = recipe.model(jax.random.key(3))
    np.testing.assert_allclose(one["normal"], by_operations["normal"], rtol=1e-6)


@pytest.mark.parametrize("needs_values", [True, False])
def test_without_a_program_it_is_the_recipes(
    needs_values: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_MOST_CONSTANTS", -1)
    recipe, key = Drawn(needs_values=needs_values), jax.random.key(3)
    assert (model_program(step(recipe), recipe, key) is None) == needs_values
    model = initial_model(step(recipe), recipe, 3)
    jax.tree.map(np.testing.assert_array_equal, model, recipe.model(key))
