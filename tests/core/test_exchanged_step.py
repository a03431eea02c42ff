"""A step of which islands exchange parts: one device's numbers, and in mode `exact` its bits."""

import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.agreement import How, agrees, has_the_bits_of_one_device, on
from support.cases import CASES, Case
from support.tiers import only

import replicax as rx
from replicax.verify.simulated_islands import SimulatedIslands

PLAIN = dataclasses.replace(CASES["pytree"], batch=16, epochs=2)
"""51 rows, of which the last batch of an epoch has 3."""
FULL = {name: rows[:48] for name, rows in PLAIN.source.items()}


def plain(model: Any, batch: Any, key: Any) -> Any:
    return PLAIN.loss(model, batch, key)[0]


def noisy(model: Any, batch: Any, key: Any) -> Any:
    values = plain(model, batch, key)
    return values if key is None else values + 0.1 * jax.random.normal(key, values.shape)


def contrastive(model: Any, batch: Any, key: Any) -> Any:
    hidden = jnp.tanh(batch["x"] @ model["hidden"]["kernel"])
    return jax.nn.logsumexp(hidden @ rx.gather(hidden).T, -1) - (hidden * hidden).sum(-1)


def own_step(state: Any, batch: Any, key: Any) -> Any:
    """Take three turns of a scan, each with a sum over all rows, and one step after them."""
    gradient = rx.value_and_grad(plain)

    def stepped(model: Any, found: Any) -> Any:
        return optax.apply_updates(model, jax.tree.map(lambda leaf: -0.1 * leaf, found))

    def turn(model: Any, _: Any) -> Any:
        metrics, found = gradient(model, batch, key)
        return stepped(model, found), metrics["loss"]

    model, losses = jax.lax.scan(turn, state, None, length=3)
    _, found = gradient(model, batch, key)
    return stepped(model, found), {"loss": losses[-1]}


def kernels() -> Any:
    model = PLAIN.model()
    return {name: model[name] for name in ("hidden", "out")}


NOISY = dataclasses.replace(PLAIN, loss=noisy)
GATHER = Case(kernels, contrastive, FULL, batch=16, epochs=2)
NORMED = dataclasses.replace(CASES["linen"], batch=16, epochs=2)
OWN_STEP = Case(kernels, None, PLAIN.source, step=own_step, batch=16, epochs=2)
BOUNDS = {
    **dict.fromkeys(("first", "last", "gradient", "extras", "evaluated"), 1e-6),
    **dict.fromkeys(("params", "opt_state"), 1e-5),
}

IN_LAYOUTS = [
    on(mode, layout, data=1 if mode == "single" else 2, accumulate=accumulate)
    for mode, layouts in (
        ("single", ("replicated",)),
        ("jit", ("replicated", "zero1", "fsdp")),
        ("shard_map", ("replicated", "zero1", "fsdp")),
        ("pmap", ("replicated",)),
    )
    for layout in layouts
    for accumulate in (1, 2)
]
ALTERNATELY = [how for n, how in enumerate(IN_LAYOUTS) if how.accumulate == 1 + n // 2 % 2]


@pytest.mark.promise("islands.other-modes")
@pytest.mark.parametrize("how", only(ALTERNATELY, IN_LAYOUTS), ids=str)
def test_three_islands_compute_what_one_device_does(how: How) -> None:
    how = dataclasses.replace(how, optimizer="clipped", islands=3, micro_shards=4)
    found = agrees(PLAIN, how, BOUNDS, wanted=dataclasses.replace(how.alone, accumulate=1))
    assert found.dp.job.exchanges == 12  # 8 steps and 4 batches of an evaluation


@pytest.mark.promise("exact.any-islands")
@pytest.mark.parametrize("islands", only([1, 3, 7], [1, 2, 3, 5, 6, 7, 8]))
def test_any_number_of_islands_has_the_bits_of_one_device(islands: int) -> None:
    has_the_bits_of_one_device(NOISY, on("exact", data=1, islands=islands))


EXACT = {
    "zero1": (PLAIN, on("exact", "zero1")),
    "bfloat16": (PLAIN, on("exact", reduction="bfloat16")),
    "zero1 bfloat16": (PLAIN, on("exact", "zero1", reduction="bfloat16")),
    "gather": (GATHER, on("exact")),
    "gather zero1": (GATHER, on("exact", "zero1")),
    "BatchNorm": (NORMED, on("exact")),
    "own step": (OWN_STEP, on("exact")),
}
ON_DEVICES = [*itertools.product(EXACT, (1, 2, 4))]
ONE_OF_EACH = [case for n, case in enumerate(ON_DEVICES) if n % 3 == n // 3 % 3]


@pytest.mark.parametrize(("name", "devices"), only(ONE_OF_EACH, ON_DEVICES))
def test_every_kind_of_step_has_the_bits_of_one_device(name: str, devices: int) -> None:
    case, how = EXACT[name]
    how = dataclasses.replace(how, axes=(("data", devices),), optimizer="clipped", islands=3)
    has_the_bits_of_one_device(case, how)


def test_batch_statistics_are_the_means_of_the_parts() -> None:
    case = dataclasses.replace(NORMED, source=FULL)
    agrees(case, on("jit", data=1, islands=3), BOUNDS, wanted=on("exact", data=1))


def test_random_numbers_differ_between_parts_and_not_between_islands() -> None:
    alone = on("jit", data=1, islands=1)
    has_the_bits_of_one_device(NOISY, on("jit", data=1, islands=3), wanted=alone)


def test_each_part_draws_its_own_random_numbers() -> None:
    def drawn(model: Any, batch: Any, key: Any) -> Any:
        return jax.random.normal(key, batch["x"].shape[:1]) + 0 * model["out"]["bias"].sum()

    mesh, job = rx.make_mesh(devices=jax.devices()[:1]), SimulatedIslands(3)
    dp = rx.DataParallel(drawn, optax.sgd(0.1), mesh=mesh, micro_shards=4, job=job)
    _, metrics = dp.step(dp.init(PLAIN.model()), next(iter(dp.feed(FULL, PLAIN.batch))))
    step = jax.random.fold_in(jax.random.key(0), 0)
    keys = [jax.random.fold_in(jax.random.fold_in(step, n), 0) for n in range(4)]  # micro-batch 0
    draws = [jax.random.normal(key, (PLAIN.batch // 4,)) for key in keys]
    np.testing.assert_allclose(metrics["loss"], np.mean(draws), atol=1e-6)


@pytest.mark.parametrize("mode", ["jit", "shard_map"])
def test_own_steps_need_mode_exact(mode: str) -> None:
    dp = rx.DataParallel(step=own_step, mode=mode, job=SimulatedIslands(2))
    with pytest.raises(rx.errors.ConfigError, match="exact"):
        dp.init(PLAIN.model())


def test_rows_that_mix_across_parts_are_refused() -> None:
    def centred(model: Any, batch: Any, key: Any) -> Any:
        values = plain(model, batch, key)
        return values - values.mean()

    mesh = rx.make_mesh(devices=jax.devices()[:1])
    dp = rx.DataParallel(centred, optax.sgd(0.1), mesh=mesh, job=SimulatedIslands(2))
    state = dp.init(PLAIN.model())
    with pytest.raises(rx.errors.LossError):
        dp.step(state, next(iter(dp.feed(FULL, PLAIN.batch))))


def test_parts_are_a_power_of_two() -> None:
    dp = rx.DataParallel(plain, optax.sgd(0.1), mode="jit", micro_shards=6, job=SimulatedIslands(2))
    with pytest.raises(rx.errors.ConfigError, match="8"):
        dp.init(PLAIN.model())


def test_state_of_a_reduction_is_refused() -> None:
    class Feedback:
        name = "feedback"

        def init(self, params: Any) -> Any:
            return jax.tree.map(jnp.zeros_like, params)

        def __call__(self, sums: Any, own: Any, axis: Any) -> Any:
            return jax.tree.map(lambda leaf: jax.lax.psum(leaf, axis), sums), own

    dp = rx.DataParallel(
        plain, optax.sgd(0.1), mode="shard_map", reduction=Feedback(), job=SimulatedIslands(2)
    )
    with pytest.raises(rx.errors.ConfigError, match="float32"):
        dp.init(PLAIN.model())
