"""Random numbers of a step: one draw in the global view, one for each replica elsewhere."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.training import parallel

import replicax as rx

DATA = {"x": np.ones((16, 1), np.float32)}


def drawn(rows: Any, key: Any) -> dict[str, Any]:
    """Return one number for all rows of the replica, and its square."""
    number = jax.random.uniform(key) * jnp.ones(len(rows))
    return {"number": number, "square": number**2}


def loss(model: Any, batch: Any, key: Any) -> Any:
    return model * batch["x"][:, 0], drawn(batch["x"], key)


def step(state: Any, batch: Any, key: Any) -> Any:
    found = {name: rx.mean(values) for name, values in drawn(batch["x"], key).items()}
    return state, {"loss": rx.mean(batch["x"][:, 0]), **found}


@pytest.mark.parametrize(("mode", "apart"), [("jit", False), ("shard_map", True), ("pmap", True)])
@pytest.mark.parametrize("own", [False, True])
def test_each_replica_draws_its_own(mode: str, apart: bool, own: bool) -> None:
    given: dict[str, Any] = {"step": step} if own else {"loss": loss, "optimizer": optax.sgd(0.1)}
    dp = parallel(**given, mode=mode)
    state = dp.init(jnp.float32(1))
    seen = []
    for _ in range(2):
        state, metrics = dp.step(state, DATA)
        variance = float(metrics["square"] - metrics["number"] ** 2)
        assert (variance > 1e-3) == apart
        seen.append(float(metrics["number"]))
    assert seen[0] != seen[1]
