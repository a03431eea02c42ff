"""Mode `jit` traced for several GPUs: one reduction in float32, or the global view."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from support.counted_metrics import F1
from support.tiers import only
from support.training import assert_near, normals, parallel

import replicax as rx
from replicax.analysis.compiled import inspect
from replicax.core.ground.traced_for import traced_for

ROWS, WIDTH, LAYERS = 16, 8, 3
BATCH = {"x": normals(0)(ROWS, WIDTH), "y": normals(1)(ROWS)}
PLACES = jnp.linspace(0.5, 2.0, ROWS)


def model() -> dict[str, jax.Array]:
    keys = jax.random.split(jax.random.key(0))
    return {
        "h": jax.random.normal(keys[0], (LAYERS, WIDTH, WIDTH)) / 3,
        "out": jax.random.normal(keys[1], (WIDTH,)),
    }


def predicted(model: Any, x: jax.Array) -> jax.Array:
    hidden, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, model["h"])
    return hidden @ model["out"]


def apart(model: Any, batch: Any, key: Any) -> Any:
    return (predicted(model, batch["x"]) - batch["y"]) ** 2


def compares_rows(model: Any, batch: Any, key: Any) -> Any:
    found = predicted(model, batch["x"])
    return (found - jnp.mean(found) - batch["y"]) ** 2


def draws(model: Any, batch: Any, key: Any) -> Any:
    kept = 1.0 if key is None else jax.random.bernoulli(key, 0.8, batch["x"].shape)
    return (predicted(model, batch["x"] * kept) - batch["y"]) ** 2


def as_many_blocks_as_rows(model: Any, batch: Any, key: Any) -> Any:
    blocks = jnp.sum(jnp.arange(ROWS, dtype=jnp.float32) > batch["y"][:, None], axis=1)
    return apart(model, batch, key) + 0 * blocks


def by_place(model: Any, batch: Any, key: Any) -> Any:
    return PLACES * (predicted(model, batch["x"]) - batch["y"]) ** 2


def names_rows(model: Any, batch: Any, key: Any) -> Any:
    halves = predicted(model, batch["x"].reshape(2, ROWS // 2, WIDTH)).reshape(ROWS)
    return (halves - batch["y"]) ** 2


def counts(model: Any, batch: Any, key: Any) -> Any:
    score = predicted(model, batch["x"])
    metrics = {"f1": F1.of(score, batch["y"] > 0, rx.row_weights(score))}
    return (score - batch["y"]) ** 2, metrics


@pytest.fixture
def on_gpus() -> Iterator[None]:
    with traced_for(9.0):
        yield


def trained(loss: Any, mode: str, **settings: Any) -> tuple[Any, Any]:
    """Return the parameters after three steps, and the traffic of a step."""
    dp = parallel(loss, optax.adam(0.01), mode=mode, **settings)
    sent = inspect(dp.lower(model(), BATCH).compile()).collectives
    state = dp.init(model())
    for _ in range(3):
        state, _ = dp.step(state, BATCH)
    return dp.model(state), sent


check_equal = partial(assert_near, rtol=0, atol=1e-6)


@pytest.mark.usefixtures("on_gpus")
@pytest.mark.parametrize("settings", only([{}], [{}, {"accumulate": 2}, {"precision": "bfloat16"}]))
def test_where_rows_are_apart_it_is_the_step_of_each_replica(settings: Any) -> None:
    found, sent = trained(apart, "jit", **settings)
    by_replica, once = trained(apart, "shard_map", **settings)
    check_equal(found, by_replica)
    assert sent == once
    if not settings:
        check_equal(found, trained(apart, "single")[0])


@pytest.mark.usefixtures("on_gpus")
def test_so_it_is_with_a_metric_of_counts() -> None:
    found, sent = trained(counts, "jit")
    by_replica, once = trained(counts, "shard_map")
    check_equal(found, by_replica)
    assert sent == once


@pytest.mark.usefixtures("on_gpus")
def test_numbers_that_are_by_chance_that_of_the_rows_do_not_matter() -> None:
    assert trained(as_many_blocks_as_rows, "jit")[1] == trained(apart, "shard_map")[1]


@pytest.mark.usefixtures("on_gpus")
@pytest.mark.parametrize(
    "loss", only([compares_rows, by_place], [compares_rows, draws, by_place, names_rows])
)
def test_else_the_whole_batch_is_seen(loss: Any) -> None:
    check_equal(trained(loss, "jit")[0], trained(loss, "single")[0])


@pytest.mark.usefixtures("on_gpus")
def test_reductions_may_overlap_unless_told_otherwise() -> None:
    def dp(devices: int, **settings: Any) -> rx.DataParallel:
        return parallel(apart, optax.sgd(0.1), devices=devices, **settings)

    option = {"xla_gpu_experimental_parallel_collective_overlap_limit": 8}
    assert dp(2).configuration.names()["compiler_options"] == option
    assert str(option) in repr(dp(2))
    assert "compiler_options" not in dp(1).configuration.names()
    assert "compiler_options" not in dp(2, compiler_options={}).configuration.names()
    own = {"xla_gpu_autotune_level": 0}
    assert dp(1, compiler_options=own).configuration.names()["compiler_options"] == own


def test_options_reach_the_compiler() -> None:
    dp = rx.DataParallel(apart, optax.sgd(0.1), compiler_options={"no_such_option": 1})
    with pytest.raises(Exception, match="no_such_option"):
        dp.lower(dp.init(model()), BATCH).compile()
