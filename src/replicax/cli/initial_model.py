"""The initial model of a recipe, computed in one program.

It compiles in a third of the time of an operation at a time, of which a model has dozens.
"""

import contextlib
import dataclasses
import math
from typing import Any

import jax
import numpy as np
from jax.extend.core import jaxpr_as_fun

import replicax as rx
from replicax.core.ground.quick_compile import quick_options
from replicax.core.models.definition import Definition

_MOST_CONSTANTS = 1 << 20
"""Most numbers that a program may hold; a recipe that brings more is computed by operation."""
_MOST_QUICK = 1 << 22
"""Most numbers that are computed by code that was not optimized: more take longer than that."""


@dataclasses.dataclass(frozen=True)
class ModelProgram:
    """The program of the arrays of a recipe's model."""

    traced: jax.stages.Traced
    definition: Definition
    platform: str

    def __call__(self, key: jax.Array) -> Any:
        """Return the model of a key."""
        closed, parts = self.traced.jaxpr, self.traced.out_info
        if sum(np.size(each) for each in closed.consts) > _MOST_CONSTANTS:
            leaves = jaxpr_as_fun(closed)(key)
            return self.definition.merge(*jax.tree.unflatten(jax.tree.structure(parts), leaves))
        numbers = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(parts))
        options = quick_options(self.platform) if numbers <= _MOST_QUICK else None
        return self.definition.merge(*self.traced.lower().compile(options)(key))


def model_program(dp: rx.DataParallel, recipe: Any, key: jax.Array) -> ModelProgram | None:
    """Return the program of a recipe's model; None if that needs values of arrays, or fails."""
    definitions: list[Definition] = []

    def arrays(key: jax.Array) -> Any:
        definition, *parts = dp.configuration.split_model(recipe.model(key), dp.mesh)
        definitions.append(definition)
        return parts

    with contextlib.suppress(Exception):  # of the recipe, which raises it again outside of a trace
        traced = jax.jit(arrays).trace(key)
        return ModelProgram(traced, definitions[0], dp.mesh.devices.flat[0].platform)
    return None


def initial_model(dp: rx.DataParallel, recipe: Any, seed: int) -> Any:
    """Return the model of a recipe that a run begins with."""
    key = jax.random.key(seed)
    program = model_program(dp, recipe, key)
    return recipe.model(key) if program is None else program(key)
