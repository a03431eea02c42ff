"""The reduction comes after the last gradient: followed through the compiled program."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec
from support.training import normals

from replicax.verify.reduced import unreduced

BATCH = {"x": normals(0)(16, 3)}
W = np.ones(3, np.float32)


def mean(w: Any, batch: Any) -> Any:
    return jnp.mean((batch["x"] @ w) ** 2)


def halves(w: Any, batch: Any) -> Any:
    return [jax.grad(mean)(w, {"x": batch["x"][part::2]}) for part in (0, 1)]


def once(w: Any, batch: Any) -> Any:
    return w - jax.lax.pmean(sum(halves(w, batch)), "data"), jax.lax.pmean(mean(w, batch), "data")


def before_the_last(w: Any, batch: Any) -> Any:
    first, last = halves(w, batch)
    return w - jax.lax.pmean(first, "data") - last, jnp.float32(0)


def own_loss(w: Any, batch: Any) -> Any:
    return once(w, batch)[0], mean(w, batch)


def in_a_loop(w: Any, batch: Any) -> Any:
    def add(total: Any, rows: Any) -> Any:
        return total + jax.lax.pmean(jax.grad(mean)(w, {"x": rows}), "data"), None

    return w - jax.lax.scan(add, 0 * w, batch["x"].reshape(2, -1, 3))[0], jnp.float32(0)


@pytest.mark.parametrize(
    ("step", "names"),
    [(once, []), (before_the_last, ["state"]), (own_loss, ["loss"]), (in_a_loop, [])],
)
def test_rows_reach_the_state_through_a_reduction(step: Any, names: list[str]) -> None:
    mesh, own, all_same = Mesh(jax.devices()[:2], "data"), PartitionSpec("data"), PartitionSpec()
    into = {"in_specs": (all_same, own), "out_specs": (all_same, all_same)}
    mapped = jax.jit(jax.shard_map(step, mesh=mesh, check_vma=False, **into))
    assert unreduced(mapped.lower(W, BATCH).compile(), W) == names


def test_a_sum_over_another_axis_is_none() -> None:
    mesh = Mesh(np.reshape(jax.devices()[:4], (2, 2)), ("data", "model"))

    def step(w: Any, batch: Any) -> Any:
        return w - jax.lax.pmean(jax.grad(mean)(w, batch), "model")

    specs = {"in_specs": (PartitionSpec(), PartitionSpec("data")), "out_specs": PartitionSpec()}
    mapped = jax.jit(jax.shard_map(step, mesh=mesh, check_vma=False, **specs))
    assert unreduced(mapped.lower(W, BATCH).compile(), W, mesh.shape) == ["state"]
