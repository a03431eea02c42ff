"""A loss, a model and rows for a short bench."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from replicax.analysis import host
from replicax.bench import runner
from replicax.bench.bench_result import Bench
from replicax.bench.run import bench
from replicax.core.data_parallel import DataParallel

ROWS = 20
SOURCE = {"x": np.random.default_rng(0).normal(size=(ROWS, 6)).astype(np.float32)}
MODEL = {"w": jnp.full((6, 4), 0.1), "b": jnp.zeros(4)}
MODEL_BYTES = 4 * (6 * 4 + 4)


def loss(model: Any, batch: Any, key: Any) -> jax.Array:
    """Squared outputs of a linear layer, summed by row."""
    return jnp.sum((batch["x"] @ model["w"] + model["b"]) ** 2, axis=1)


@pytest.fixture(autouse=True, scope="module")
def short() -> Iterator[None]:
    """Rounds of few steps, and a small probe of the host; import this where a bench runs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "RUN_SECONDS", 0.0)
        patch.setattr(host, "SIZE", 32)
        yield


def run(**options: Any) -> Bench:
    """Bench the above, by default in 2 rounds of batches of 8 rows."""
    given = {"batch_size": 8, "rounds": 2, "progress": False, **options}
    step = {
        name: given.pop(name)
        for name in ("layout", "accumulate", "reduction", "mode")
        if name in given
    }
    return bench(
        given.pop("dp", None) or parallel(**step), MODEL, given.pop("source", SOURCE), **given
    )


def parallel(function: Any = loss, **settings: Any) -> DataParallel:
    return DataParallel(function, optax.sgd(0.01), **settings)
