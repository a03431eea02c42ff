"""Rounds that must equal training without them, on 1 to 8 simulated islands."""

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
import optax
import pytest
from support.agreement import agrees, on, reference
from support.cases import CASES
from support.rounds import MODEL, PLAIN, SOURCE, assert_close, noisy, over, train
from support.rounds import on as on_islands
from support.tiers import only

import replicax as rx

CASE = dataclasses.replace(CASES["pytree"], epochs=8)
BOUNDS = dict.fromkeys(("params", "extras", "evaluated"), 1e-6)


@pytest.mark.parametrize("devices", only([1, 2, 8], [1, 2, 4, 8]))
def test_a_round_of_one_step_is_data_parallelism(devices: int) -> None:
    found = agrees(CASE, on("shard_map", data=devices, optimizer="sgd", rounds=over(1)), BOUNDS)
    alone = reference(CASE, on("single", optimizer="sgd"))
    losses, wanted = ([each["loss"] for each in own.told] for own in (found, alone))
    assert [each["round_loss"] for each in found.told] == losses
    np.testing.assert_allclose(losses, wanted, rtol=1e-5)


@pytest.mark.parametrize("every", [1, 2, 4, 8])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_one_island_trains_as_without_rounds(every: int, optimizer: str) -> None:
    agrees(CASE, on("shard_map", data=1, optimizer=optimizer, rounds=over(every)), BOUNDS)


@pytest.mark.parametrize("mode", ["single", "jit", "shard_map", "exact"])
def test_the_island_of_a_job_of_one_trains_as_without_rounds(mode: str) -> None:
    rounds = rx.Rounds(4, outer=PLAIN)
    agrees(CASE, on(mode, data=1, optimizer="sgd", rounds=rounds), BOUNDS)


SENT = [(devices, send) for devices in (2, 4, 8) for send in ("float32", "int8", "int4", "sparse")]
ONE_OF_EACH = [SENT[n] for n in (0, 5, 10, 3)]


@functools.cache
def of_one_island(send: str) -> Any:
    """Return what one island makes of four rows."""
    return jax.device_get(trained_on_equal_rows(1, send))


def trained_on_equal_rows(devices: int, send: str) -> Any:
    """Return the parameters of islands with the same four rows."""
    equal = {name: np.tile(each[:4], (devices, 1)) for name, each in SOURCE.items()}
    islands = over(2, send=send, outer=optax.sgd(0.6, momentum=0.9, nesterov=True))
    return train(on_islands(devices, islands), source=equal, size=4 * devices)[0].params


@pytest.mark.parametrize(("devices", "send"), only(ONE_OF_EACH, SENT))
def test_islands_with_equal_rows_are_one(devices: int, send: str) -> None:
    assert_close(trained_on_equal_rows(devices, send), of_one_island(send), 1e-5)


def test_islands_draw_other_random_numbers() -> None:
    rows = {name: np.tile(each[:4], (2, 1)) for name, each in SOURCE.items()}
    state, _ = train(on_islands(2, over(4), loss=noisy), source=rows, steps=2, size=8)
    first, second = np.asarray(state.islands.inner.params["a"])
    assert np.abs(first - second).max() > 1e-4
    assert jax.tree.all(jax.tree.map(np.array_equal, state.params, MODEL))


def test_micro_batches_add_up_within_an_island() -> None:
    whole = on("shard_map", data=2, optimizer="sgd", rounds=over(2))
    agrees(CASE, dataclasses.replace(whole, accumulate=2), BOUNDS, wanted=whole)
