"""The examples in the docstring of `host_executor`: which programs are called, and how often."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import replicax as rx
from replicax.core.ground.in_flight import InFlight
from replicax.core.modes.exact.combining_programs import CollectivePrograms
from replicax.core.modes.exact.host_executor import HostExecutor
from replicax.core.modes.exact.micro_shard_primitives import sum_all
from replicax.core.modes.exact.replica_program import ReplicaProgram
from replicax.core.placement.mesh import sharding_of
from replicax.core.step.reduction import REDUCTIONS

COUNT = 4
ROWS = np.arange(8, dtype=np.float32)


def step(w: Any, x: jax.Array) -> Any:
    each = x * jnp.tanh(w)
    [total] = sum_all(
        [each.sum()], wire=REDUCTIONS["float32"], sent=[True], shard_dims=[None], count=COUNT
    )
    return w * 0.9 - total


def scanned(w: Any, x: jax.Array) -> Any:
    return lax.scan(lambda w, _: (step(w, x), w * 2), w, None, length=3)


def branched(w: Any, x: jax.Array) -> Any:
    return lax.cond(w > 0, lambda: step(w, x), lambda: w)


def called(
    function: Callable[..., Any], devices: int, w: float, monkeypatch: pytest.MonkeyPatch
) -> tuple[list[str], list[np.ndarray]]:
    """The programs that `function` calls, in order, and its results."""
    names: list[str] = []
    call = ReplicaProgram.__call__

    def noted(program: ReplicaProgram, *arrays: jax.Array) -> list[jax.Array]:
        names.append(program.name)
        return call(program, *arrays)

    monkeypatch.setattr(ReplicaProgram, "__call__", noted)
    mesh = rx.make_mesh(devices=jax.devices()[:devices])
    collectives = CollectivePrograms(mesh, COUNT // devices, InFlight())
    weight = np.float32(w)
    closed = jax.make_jaxpr(lambda *values: jax.tree.leaves(function(*values)))(weight, ROWS[:2])
    results = [None] * len(closed.out_avals)
    executor = HostExecutor("step", closed, [None, 0], results, collectives, {})
    arrays = [jax.device_put(weight, sharding_of(mesh, None))]
    arrays.append(jax.device_put(ROWS, sharding_of(mesh, 0)))
    return names, list(map(np.asarray, executor(collectives.cut([None, 0])(arrays))))


def test_each_turn_of_a_scan_calls_the_same_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    names, [_, stacked] = called(scanned, 2, 0.5, monkeypatch)
    assert names == ["step.0.0", "step.0.0", "step.0.1"] * 3 + ["step.2.0"]
    assert stacked[:2] == pytest.approx([1, 2 * (0.45 - np.tanh(0.5) * ROWS.sum())], rel=1e-6)


@pytest.mark.parametrize(
    ("w", "programs"), [(0.5, ["step.0", "step.1.0", "step.1.0", "step.1.1"]), (-0.5, ["step.0"])]
)
def test_the_host_calls_the_branch_that_is_taken(
    w: float, programs: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    names, _ = called(branched, 2, w, monkeypatch)
    assert names == programs
