"""A step of which islands exchange parts: one device's numbers, and in mode `exact` its bits."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen

import replicax as rx
from replicax.core.ground.job import Job
from replicax.verify.simulated_islands import SimulatedIslands

ROWS, BATCH = 60, 16
RNG = np.random.default_rng(0)
SOURCE = {
    "x": RNG.normal(size=(ROWS, 8)).astype(np.float32),
    "y": RNG.normal(size=(ROWS, 8)).astype(np.float32),
}
FULL = {name: rows[:48] for name, rows in SOURCE.items()}
MODEL = {"w": jnp.asarray(RNG.normal(size=(8, 8)), jnp.float32), "b": jnp.zeros(8)}


def squared(model: Any, batch: Any, key: Any) -> Any:
    return (jnp.tanh(batch["x"] @ model["w"] + model["b"]) - batch["y"]) ** 2


def noisy(model: Any, batch: Any, key: Any) -> Any:
    values = squared(model, batch, key).mean(-1)
    return values if key is None else values + 0.1 * jax.random.normal(key, values.shape)


def contrastive(model: Any, batch: Any, key: Any) -> Any:
    hidden = jnp.tanh(batch["x"] @ model["w"])
    return jax.nn.logsumexp(hidden @ rx.gather(hidden).T, -1) - (hidden * hidden).sum(-1)


class Normed(linen.Module):
    @linen.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        x = linen.BatchNorm(use_running_average=not train)(linen.Dense(8)(x))
        return linen.Dense(8)(x)


def normed(model: Any, batch: Any, key: Any) -> Any:
    return ((model(batch["x"], train=key is not None) - batch["y"]) ** 2).mean(-1)


def normed_model() -> Any:
    module = Normed()
    return module.bind(module.init(jax.random.key(0), jnp.zeros((1, 8)), train=True))


def own_step(state: Any, batch: Any, key: Any) -> Any:
    """Take three turns of a scan, each with a sum over all rows, and one step after them."""
    gradient = rx.value_and_grad(squared)

    def turn(model: Any, _: Any) -> Any:
        metrics, found = gradient(model, batch, key)
        return jax.tree.map(lambda w, g: w - 0.1 * g, model, found), metrics["loss"]

    model, losses = jax.lax.scan(turn, state, None, length=3)
    _, found = gradient(model, batch, key)
    return jax.tree.map(lambda w, g: w - 0.1 * g, model, found), {"loss": losses[-1]}


def train(
    devices: int, job: Job | None = None, source: Any = SOURCE, model: Any = MODEL, **options: Any
) -> list[np.ndarray]:
    """Return the state after two epochs, the last metrics, and those of an evaluation."""
    mesh = rx.make_mesh(devices=jax.devices()[:devices])
    if "step" not in options:
        clipped = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.05))
        options = {"loss": squared, "optimizer": clipped, **options}
    dp = rx.DataParallel(mesh=mesh, job=job, **options)
    state, metrics = dp.init(model), {}
    for epoch in range(2):
        for batch in dp.feed(source, BATCH, epoch=epoch, shuffle=True):
            state, metrics = dp.step(state, batch)
    scores = {} if "step" in options else dp.evaluate(state, dp.feed(source, BATCH))
    return list(map(np.asarray, jax.tree.leaves((state, metrics, scores))))


def assert_close(found: list[np.ndarray], wanted: list[np.ndarray]) -> None:
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("mode", "layout", "devices"),
    [
        ("single", "replicated", 1),
        *itertools.product(("jit",), ("replicated", "zero1", "fsdp"), (2,)),
        *itertools.product(("shard_map",), ("replicated", "zero1", "fsdp"), (2,)),
        ("pmap", "replicated", 2),
    ],
)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_three_islands_compute_what_one_device_does(
    mode: str, layout: str, devices: int, accumulate: int
) -> None:
    job = SimulatedIslands(3)
    options = {"mode": mode, "layout": layout, "micro_shards": 4, "accumulate": accumulate}
    assert_close(train(devices, job, **options), train(1, mode="single"))
    assert job.exchanges == 12  # 8 steps and 4 batches of an evaluation


@pytest.mark.parametrize("islands", [1, 2, 3, 5, 6, 7, 8])
def test_any_number_of_islands_has_the_bits_of_one_device(islands: int) -> None:
    found = train(1, SimulatedIslands(islands), mode="exact", loss=noisy)
    for one, other in zip(found, train(1, mode="exact", loss=noisy), strict=True):
        assert one.tobytes() == other.tobytes()


EXACT: dict[str, dict[str, Any]] = {
    "zero1": {"layout": "zero1"},
    "bfloat16": {"reduction": "bfloat16"},
    "zero1 bfloat16": {"layout": "zero1", "reduction": "bfloat16"},
    "gather": {"loss": contrastive, "source": FULL},
    "gather zero1": {"loss": contrastive, "source": FULL, "layout": "zero1"},
    "BatchNorm": {"loss": normed, "model": normed_model},
    "own step": {"step": own_step},
}


@pytest.mark.parametrize("devices", [1, 2, 4])
@pytest.mark.parametrize("name", EXACT)
def test_every_kind_of_step_has_the_bits_of_one_device(name: str, devices: int) -> None:
    options = {**EXACT[name]}
    if "model" in options:
        options["model"] = options["model"]()
    found = train(devices, SimulatedIslands(3), mode="exact", **options)
    for one, other in zip(found, train(1, mode="exact", **options), strict=True):
        assert one.tobytes() == other.tobytes()


def test_batch_statistics_are_the_means_of_the_parts() -> None:
    model = normed_model()
    options = {"loss": normed, "model": model, "source": FULL}
    found = train(1, SimulatedIslands(3), mode="jit", **options)
    wanted = train(1, mode="exact", **options)
    assert_close(found, wanted)


def test_random_numbers_differ_between_parts_and_not_between_islands() -> None:
    options = {"mode": "jit", "loss": noisy, "micro_shards": 4}
    alone = train(1, SimulatedIslands(1), **options)
    for one, other in zip(train(1, SimulatedIslands(3), **options), alone, strict=True):
        assert one.tobytes() == other.tobytes()


def test_each_part_draws_its_own_random_numbers() -> None:
    def drawn(model: Any, batch: Any, key: Any) -> Any:
        return jax.random.normal(key, batch["x"].shape[:1]) + 0 * model["b"].sum()

    mesh, job = rx.make_mesh(devices=jax.devices()[:1]), SimulatedIslands(3)
    dp = rx.DataParallel(drawn, optax.sgd(0.1), mesh=mesh, micro_shards=4, job=job)
    _, metrics = dp.step(dp.init(MODEL), next(iter(dp.feed(FULL, BATCH))))
    step = jax.random.fold_in(jax.random.key(0), 0)
    keys = [jax.random.fold_in(jax.random.fold_in(step, n), 0) for n in range(4)]  # micro-batch 0
    draws = [jax.random.normal(key, (BATCH // 4,)) for key in keys]
    np.testing.assert_allclose(metrics["loss"], np.mean(draws), atol=1e-6)


@pytest.mark.parametrize("mode", ["jit", "shard_map"])
def test_own_steps_need_mode_exact(mode: str) -> None:
    dp = rx.DataParallel(step=own_step, mode=mode, job=SimulatedIslands(2))
    with pytest.raises(rx.ConfigError, match="exact"):
        dp.init(MODEL)


def test_rows_that_mix_across_parts_are_refused() -> None:
    def centred(model: Any, batch: Any, key: Any) -> Any:
        values = squared(model, batch, key).mean(-1)
        return values - values.mean()

    mesh = rx.make_mesh(devices=jax.devices()[:1])
    dp = rx.DataParallel(centred, optax.sgd(0.1), mesh=mesh, job=SimulatedIslands(2))
    state = dp.init(MODEL)
    with pytest.raises(rx.LossError):
        dp.step(state, next(iter(dp.feed(FULL, BATCH))))


def test_parts_are_a_power_of_two() -> None:
    dp = rx.DataParallel(
        squared, optax.sgd(0.1), mode="jit", micro_shards=6, job=SimulatedIslands(2)
    )
    with pytest.raises(rx.ConfigError, match="8"):
        dp.init(MODEL)


def test_state_of_a_reduction_is_refused() -> None:
    class Feedback:
        name = "feedback"

        def init(self, params: Any) -> Any:
            return jax.tree.map(jnp.zeros_like, params)

        def __call__(self, sums: Any, own: Any, axis: Any) -> Any:
            return jax.tree.map(lambda leaf: jax.lax.psum(leaf, axis), sums), own

    dp = rx.DataParallel(
        squared, optax.sgd(0.1), mode="shard_map", reduction=Feedback(), job=SimulatedIslands(2)
    )
    with pytest.raises(rx.ConfigError, match="float32"):
        dp.init(MODEL)
