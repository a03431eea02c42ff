"""Rounds that must equal training without them, on 1 to 8 simulated islands."""

from typing import Any

import jax
import numpy as np
import optax
import pytest
from support.rounds import MODEL, SOURCE, assert_close, noisy, on, over, train

ALL = (1, 2, 4, 8)


@pytest.mark.parametrize("devices", ALL)
def test_a_round_of_one_step_is_data_parallelism(devices: int) -> None:
    wanted, plain = train(on(devices))
    found, told = train(on(devices, over(1)))
    assert_close(found.params, wanted.params)
    assert [each["round_loss"] for each in told] == [each["loss"] for each in told]
    np.testing.assert_allclose(
        [each["loss"] for each in told], [each["loss"] for each in plain], rtol=1e-5
    )


@pytest.mark.parametrize("every", [1, 2, 4, 8])
@pytest.mark.parametrize("optimizer", [optax.sgd(0.1), optax.adam(1e-2)])
def test_one_island_trains_as_without_rounds(every: int, optimizer: Any) -> None:
    wanted, _ = train(on(1, optimizer=optimizer))
    found, _ = train(on(1, over(every), optimizer=optimizer))
    assert_close(found.params, wanted.params)


@pytest.mark.parametrize("mode", ["single", "jit", "shard_map", "exact"])
def test_the_island_of_a_job_of_one_trains_as_without_rounds(mode: str) -> None:
    import replicax as rx

    wanted, _ = train(on(1, mode=mode))
    found, _ = train(on(1, rx.Islands(4, outer=optax.sgd(1.0)), mode=mode))
    assert_close(found.params, wanted.params)


@pytest.mark.parametrize("devices", [2, 4, 8])
@pytest.mark.parametrize("send", ["float32", "int8", "int4", "sparse"])
def test_islands_with_equal_rows_are_one(devices: int, send: str) -> None:
    rows = {name: each[:16] for name, each in SOURCE.items()}
    equal = {name: np.tile(each[:4], (devices, 1)) for name, each in rows.items()}
    of_one = {name: each[:4] for name, each in rows.items()}
    islands = over(2, send=send, outer=optax.sgd(0.6, momentum=0.9, nesterov=True))
    wanted, _ = train(on(1, islands), source=of_one, size=4)
    found, _ = train(on(devices, islands), source=equal, size=4 * devices)
    assert_close(found.params, wanted.params, 1e-5)


def test_islands_draw_other_random_numbers() -> None:
    rows = {name: np.tile(each[:4], (2, 1)) for name, each in SOURCE.items()}
    state, _ = train(on(2, over(4), loss=noisy), source=rows, steps=2, size=8)
    first, second = np.asarray(state.islands.inner.params["a"])
    assert np.abs(first - second).max() > 1e-4
    assert jax.tree.all(jax.tree.map(np.array_equal, state.params, MODEL))


def test_micro_batches_add_up_within_an_island() -> None:
    wanted, _ = train(on(2, over(2)))
    found, _ = train(on(2, over(2), accumulate=2))
    assert_close(found.params, wanted.params, 1e-5)
