"""Two transports, one arithmetic: equal bits, and exactly the bytes of the codec."""

import dataclasses
import itertools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.rounds import BATCH, MODEL, SGD, SOURCE, assert_close, assert_same, noisy, on, train
from support.tiers import only

import replicax as rx
from replicax.analysis.compiled import inspect
from replicax.core.between.transports import BetweenJobs, OverMesh
from replicax.core.ground.codecs import CODECS
from replicax.verify.simulated_islands import SharingIsland, on_sharing_islands

ISLANDS = 4
OUTER = optax.sgd(0.6, momentum=0.9, nesterov=True)


def in_turn(*fragments: int) -> Any:
    """Return the codecs with each number of fragments; `make test` has one of a codec."""
    cases = [*itertools.product(CODECS, fragments)]
    kept = zip(CODECS, itertools.cycle(fragments), strict=False)
    return only(kept, cases)


def no_sums(parts: Any, /) -> Any:
    """Only divides the batch into parts; in rounds, islands exchange no sums."""
    raise NotImplementedError


def between(rounds: rx.Rounds, **options: Any) -> list[tuple[Any, list[dict[str, float]]]]:
    """Train on islands that are jobs of one device each."""

    def run(job: SharingIsland) -> tuple[Any, list[dict[str, float]]]:
        job.exchange = no_sums
        given = {"loss": noisy, "optimizer": SGD, **options}
        mesh = rx.make_mesh(devices=[jax.devices()[job.span[0]]])
        dp = rx.DataParallel(mesh=mesh, job=job, rounds=rounds, micro_shards=ISLANDS, **given)
        state, told = dp.init(MODEL), list[dict[str, float]]()
        for batch in dp.feed(SOURCE, BATCH):
            state, metrics = dp.step(state, batch)
            told.append({name: float(value) for name, value in metrics.items()})
        return jax.device_get(dp.end_round(state)), told

    return on_sharing_islands(ISLANDS, run)


@pytest.mark.parametrize("send", only(["int4"], ["float32", "int4", "sparse"]))
def test_jobs_train_as_replicas_do(send: str) -> None:
    rounds = rx.Rounds(3, send, OUTER, fragments=1)
    found = between(rounds)
    axis = dataclasses.replace(rounds, axis="data")
    dp = on(ISLANDS, axis, loss=noisy)
    state, told = train(dp, steps=4)
    state = dp.end_round(state)
    for own, metrics in found:
        assert_same(own.params, found[0][0].params)
        assert_close(own.params, state.params, 1e-5)
        np.testing.assert_allclose(
            [each["round_loss"] for each in metrics],
            [each["round_loss"] for each in told],
            rtol=1e-5,
        )
    assert np.isnan(told[0]["round_loss"])
    mean = np.mean([each["loss"] for each in told[:3]])
    np.testing.assert_allclose(told[2]["round_loss"], mean, rtol=1e-5)


def random_states(state: Any) -> Any:
    """Return a stacked state whose islands have moved, with residuals and weights."""
    rng = np.random.default_rng(3)

    def noise(leaf: Any, scale: float) -> Any:
        return leaf + jnp.asarray(rng.normal(size=leaf.shape) * scale, leaf.dtype)

    own = state.islands
    params = jax.tree.map(lambda leaf: noise(leaf, 0.1), own.inner.params)
    residual = jax.tree.map(lambda leaf: noise(leaf, 0.01), own.residual)
    weights = jnp.asarray(rng.integers(1, 9, size=own.weights.shape), jnp.float32)
    own = dataclasses.replace(
        own,
        inner=dataclasses.replace(own.inner, params=params),
        residual=residual,
        weights=weights,
    )
    return dataclasses.replace(state, islands=own, step=jnp.ones((), jnp.int32))


@pytest.mark.parametrize(("send", "fragments"), in_turn(1, 2))
def test_both_transports_compute_equal_bits(send: str, fragments: int) -> None:
    rounds = rx.Rounds(4, send, OUTER, fragments=fragments, mix=0.25, axis="data")
    dp = on(ISLANDS, rounds)
    state = random_states(dp.init(MODEL))
    step = dp.program(MODEL).step
    assert isinstance(step.transport, OverMesh)
    host = jax.device_get(state)
    wanted = jax.device_get(step.end_round(jax.device_put(state, dp.program(MODEL).shardings)))

    def run(job: SharingIsland) -> Any:
        rank = job.span[0]
        mesh = rx.make_mesh(devices=[jax.devices()[rank]])
        alone = dataclasses.replace(rounds, axis=None)
        own = on(1, alone, job=job, mode="jit").replace(mesh=mesh)
        program = own.program(MODEL)
        assert isinstance(program.step.transport, BetweenJobs)
        mine = jax.tree.map(lambda leaf: leaf[rank], host.islands)
        placed = jax.device_put(dataclasses.replace(host, islands=mine), program.shardings)
        return jax.device_get(program.step.end_round(placed))

    for rank, found in enumerate(on_sharing_islands(ISLANDS, run)):
        for name in ("params", "opt_state", "extras"):
            assert_same(getattr(found, name), getattr(wanted, name))
        assert_same(found.islands, jax.tree.map(lambda leaf, r=rank: leaf[r], wanted.islands))


@pytest.mark.parametrize(("send", "fragments"), in_turn(1, 3))
def test_a_round_sends_exactly_the_bytes_of_the_codec(send: str, fragments: int) -> None:
    dp = on(ISLANDS, rx.Rounds(3, send, OUTER, fragments=fragments, axis="data"))
    state = dp.init(MODEL)
    step = dp.program(MODEL).step
    batch = next(iter(dp.feed(SOURCE, BATCH)))
    for compiled in step.compiled(state, batch):
        assert inspect(compiled).collectives == ()
    programs = step.exchanges(state)
    assert len(programs) == fragments
    moved = [each for program in programs for each in inspect(program).collectives]
    assert {each.kind for each in moved} == {"all-gather"}
    exact = fragments * 4 * 4  # the weight, the loss and its weight, and 1
    payload = step.arithmetic.payload_bytes(MODEL)
    assert sum(each.bytes for each in moved) == ISLANDS * (payload + exact)
    text = "".join(program.as_text() or "" for program in programs)
    assert re.search(r"u8\[[\d,]+\]\S* all-gather", text)
