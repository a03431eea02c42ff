"""A state that is not finite does not become a checkpoint."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.figures import assert_mentions

import replicax as rx
from replicax.core.ground.job import Alone
from replicax.train.checkpoints.arrays import params_not_finite
from replicax.train.checkpoints.manifest import Position
from replicax.train.checkpoints.saver import Saver
from replicax.train.checkpoints.store import Store

AT = Position(1, 0, 0, 0, 0, 0, 0, 0)


def state(dtype: Any = jnp.float32, **changed: Any) -> rx.TrainState:
    params = {"a": jnp.ones((9, 8), dtype), "b": jnp.ones((), dtype), "i": jnp.arange(3)}
    dp = rx.DataParallel(lambda model, batch, key: batch["x"], optax.identity())
    made = dp.init({name: leaf for name, leaf in params.items() if name != "i"})
    return dataclasses.replace(made, params={**made.params, **changed})


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_one_element_is_found(dtype: Any, value: float) -> None:
    assert params_not_finite(state(dtype)) == set()
    bad = state(dtype, a=jnp.ones((9, 8), dtype).at[8, 7].set(value))
    assert params_not_finite(bad) == {"params.a"}


def test_what_was_never_finite_may_stay_so_and_the_rest_may_not(tmp_path: Path) -> None:
    begun = state(b=jnp.float32(-jnp.inf))
    begun = dataclasses.replace(begun, opt_state=(jax.device_put(jnp.float32(jnp.inf)),))
    saver = Saver(
        Store(tmp_path, 3, None), 1, lambda: None, Alone(), 0, {}, params_not_finite(begun)
    )
    saver.save(begun, AT, {})
    assert saver.wait()
    later = state(b=jnp.float32(-jnp.inf), a=jnp.full((9, 8), jnp.nan))
    saver.save(later, dataclasses.replace(AT, step=2), {})
    assert not saver.wait()
    (alarm,) = saver.poll()
    assert_mentions(alarm, "params.a", "longer finite", "step 1", "last good")
    assert [step for step, _ in Store(tmp_path, 3, None).paths()] == [1]
