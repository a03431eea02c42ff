"""A step that compiles once, and one whose state has another dtype after every step."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from verify import zoo_recipes as zoo

import replicax as rx
from replicax.verify.recompilation import check_recompilation
from replicax.verify.subject import Subject


def restless() -> optax.GradientTransformation:
    """Its state is an integer and a float in turn."""

    def turned(gradient: Any, count: jax.Array, params: Any = None) -> Any:
        return gradient, count.astype(jnp.float32 if count.dtype == jnp.int32 else jnp.int32)

    return optax.GradientTransformation(lambda params: jnp.int32(0), turned)


@pytest.mark.parametrize("compiles", [False, True])
def test_a_state_that_changes_its_dtype_fails(compiles: bool) -> None:
    first = restless() if compiles else optax.identity()
    dp = rx.DataParallel(zoo.good, optax.chain(first, optax.sgd(0.1)), mode="jit")
    check = check_recompilation(Subject(dp, zoo.network(), zoo.data(), 1, 0), padded=True)
    assert check.verdict == ("fail" if compiles else "pass"), check.found
