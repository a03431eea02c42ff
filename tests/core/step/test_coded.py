"""`Coded`: gradients sent in 8 or 4 bits, with whatever they lose sent in later steps.

The arithmetic is compared with a loop over replicas in NumPy, which adds in the order of the ranks.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from support.agreement import agrees, on
from support.cases import Case
from support.tiers import exhaustive, only

import replicax as rx
from replicax.analysis.collectives import sums_bytes, wire_bytes, wire_bytes_of_all_reduce
from replicax.analysis.compiled import inspect
from replicax.core.ground.codecs import BLOCK, CODECS
from replicax.core.step.base import StepSums
from replicax.core.step.coded import Coded
from replicax.core.step.loss import LOSS, WeightedSum
from replicax.core.step.reduction import REDUCTIONS
from replicax.train.files.fingerprint import sha256
from replicax.train.guarded import NOT_FINITE, guarded

ROWS = 64
SEND = pytest.mark.parametrize("send", ["int8", "int4"])

PyTree = Any


# The arithmetic.


def gradients(replicas: int, seed: int = 0) -> dict[str, np.ndarray]:
    """Return a gradient of each replica: 313 numbers in 3 leaves, which fill 7 blocks."""
    random = np.random.default_rng(seed)
    sizes = np.exp(random.normal(size=(replicas, 1, 1)))

    def leaf(*shape: int) -> np.ndarray:
        return (random.normal(size=(replicas, *shape)) * sizes[:, :, 0]).astype(np.float32)

    return {
        "b": leaf(7),
        "w": leaf(300).reshape(replicas, 20, 15),
        "z": leaf(3) + 1j * leaf(3),
    }


def blocks(tree: PyTree) -> np.ndarray:
    """Return the leaves `[replicas, ...]` as vectors of whole blocks, `[replicas, size]`."""

    def filled(leaf: np.ndarray) -> np.ndarray:
        leaf = leaf.reshape(len(leaf), -1)
        if np.iscomplexobj(leaf):
            leaf = np.concatenate([leaf.real, leaf.imag], axis=1)
        return np.pad(leaf, ((0, 0), (0, -leaf.shape[1] % BLOCK)))

    return np.concatenate([filled(leaf) for leaf in jax.tree.leaves(tree)], axis=1)


def reduced(
    coded: Coded, gradient: PyTree, residual: np.ndarray, weights: np.ndarray, mode: str = ""
) -> tuple[PyTree, np.ndarray, float]:
    """Return the total, every replica's residual, and the total weight, of one reduction."""
    mesh = rx.make_mesh(devices=jax.devices()[: len(weights)])

    def reduce(gradient: PyTree, residual: jax.Array, weight: jax.Array) -> Any:
        own = jax.tree.map(lambda leaf: leaf[0], gradient)
        sums = StepSums(own, {LOSS: WeightedSum(weight[0] * 3, weight[0])})
        total, after = coded(sums, residual[0], "data")
        return jax.tree.map(lambda leaf: leaf[None], (total.gradient, after, total.weight))

    mapped = jax.shard_map(
        reduce, mesh=mesh, in_specs=P("data"), out_specs=P("data"), check_vma=False
    )
    totals, after, weight = jax.device_get(jax.jit(mapped)(gradient, residual, weights))
    for leaf in jax.tree.leaves(totals):  # the same bits on all replicas
        np.testing.assert_array_equal(leaf, np.broadcast_to(leaf[:1], leaf.shape))
    return jax.tree.map(lambda leaf: leaf[0], totals), after, weight[0]


def by_hand(
    send: str, gradient: np.ndarray, residual: np.ndarray, weight: float
) -> tuple[np.ndarray, np.ndarray]:
    """Return the total and the residuals of vectors `[replicas, size]`."""
    replicas, size = gradient.shape
    whole = gradient + residual * np.float32(weight)
    whole = np.pad(whole, ((0, 0), (0, -size % (replicas * BLOCK))))
    codec = CODECS[send]

    def through(vector: np.ndarray) -> np.ndarray:
        return np.asarray(codec.decode(codec.encode(jnp.asarray(vector)), len(vector)))

    parts = whole.reshape(replicas, replicas, -1)
    there = np.stack([[through(part) for part in own] for own in parts])
    lost, total = parts - there, []
    for owner in range(replicas):
        found = there[0, owner]
        for rank in range(1, replicas):
            found = found + there[rank, owner]
        total.append(through(found))
        lost[owner, owner] += found - total[-1]
    return np.concatenate(total)[:size], lost.reshape(replicas, -1)[:, :size] / np.float32(weight)


@pytest.mark.parametrize("replicas", only([4], [2, 3, 4, 8]))
@pytest.mark.parametrize("send", ["int8", "int4", exhaustive("bfloat16"), exhaustive("float32")])
def test_it_is_that_of_a_loop_over_replicas_in_the_order_of_ranks(send: str, replicas: int) -> None:
    coded = Coded(send)
    residual = np.zeros((replicas, 7 * BLOCK), np.float32)
    of_hand = residual
    for step in range(3):
        # Their sum is a power of two for most: a residual times it is then exact, with or without
        # a fused addition, which could move a scale to its neighbour.
        weights = np.full(replicas, (1, 4, 2)[step], np.float32)
        gradient = gradients(replicas, step)
        total, residual, weight = reduced(coded, gradient, residual, weights)
        expected, of_hand = by_hand(send, blocks(gradient), of_hand, weights.sum())
        assert weight == weights.sum()
        found = blocks(jax.tree.map(lambda leaf: leaf[None], total))[0]
        np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)
        np.testing.assert_allclose(residual, of_hand, rtol=1e-5, atol=1e-6)
        if step == 0:
            np.testing.assert_array_equal(found, expected)
    assert coded.init(jax.tree.map(lambda leaf: leaf[0], gradients(1))).shape == (7 * BLOCK,)


@pytest.mark.parametrize("replicas", [2, 4, exhaustive(8)])
@SEND
def test_errors_are_within_the_bound_and_nothing_is_lost(send: str, replicas: int) -> None:
    coded, gradient = Coded(send), gradients(replicas)
    weights = np.full(replicas, 5, np.float32)
    zeros = np.zeros((replicas, 7 * BLOCK), np.float32)
    total, residual, weight = reduced(coded, gradient, zeros, weights)
    each = [jax.tree.map(lambda leaf, r=r: leaf[r], gradient) for r in range(replicas)]
    magnitudes = [jax.tree.map(coded.magnitude, own) for own in each]
    unsent = coded.unsent(residual, total)
    for name, found in total.items():
        expected = np.sum(gradient[name].astype(np.complex128), axis=0)
        bound = coded.error() * np.sum([own[name] for own in magnitudes], axis=0)
        for part in (np.real, np.imag):
            error = np.abs(part(found - expected))
            assert np.all(error <= part(bound) * (1 + 1e-5) + 1e-12)
        np.testing.assert_allclose(found + unsent[name] * weight, expected, rtol=1e-4, atol=1e-5)
    assert coded.error() == (1 + CODECS[send].error) ** 2 - 1
    assert {"int8": 0.0079, "int4": 0.149}[send] == pytest.approx(coded.error(), rel=0.01)


def test_a_plain_float32_total_is_added_in_the_order_of_ranks() -> None:
    numbers = np.float32([[1], [1e8], [-1e8], [1]]) * np.ones((4, 300), np.float32)
    total, residual, _ = reduced(
        Coded("float32"), [numbers], np.zeros((4, 320), np.float32), np.ones(4, np.float32)
    )
    np.testing.assert_array_equal(total[0], np.float32(1))  # 1 + 1e8 is 1e8
    assert not residual.any()


@SEND
def test_one_replica_rounds_nothing(send: str) -> None:
    gradient = gradients(1)
    zeros = np.zeros((1, 7 * BLOCK), np.float32)
    total, residual, _ = reduced(Coded(send), gradient, zeros, np.ones(1, np.float32))
    jax.tree.map(lambda one, other: np.testing.assert_array_equal(one, other[0]), total, gradient)
    assert not residual.any()


@SEND
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_without_a_finite_total_the_residual_is_kept(send: str, bad: float) -> None:
    gradient, weights = gradients(4), np.ones(4, np.float32)
    _, kept, _ = reduced(Coded(send), gradient, np.zeros((4, 7 * BLOCK), np.float32), weights)
    assert np.all(np.any(kept, axis=1))
    gradient["w"][2, 3, 4] = bad
    total, residual, _ = reduced(Coded(send), gradient, kept, weights)
    assert not np.isfinite(total["w"][3, 4])
    np.testing.assert_array_equal(residual, kept)


def test_a_batch_without_weight_keeps_the_residual() -> None:
    kept = np.random.default_rng(0).normal(size=(4, 7 * BLOCK)).astype(np.float32)
    nothing = jax.tree.map(np.zeros_like, gradients(4))
    total, residual, _ = reduced(Coded("int8"), nothing, kept, np.zeros(4, np.float32))
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(total))
    np.testing.assert_array_equal(residual, kept)


# Steps.


def network() -> dict[str, jax.Array]:
    random = np.random.default_rng(3)
    return {
        "first": jnp.asarray(random.normal(size=(24, 40)) / 5, jnp.float32),
        "last": jnp.asarray(random.normal(size=(40, 8)) / 6, jnp.float32),
        "shift": jnp.zeros(8),
    }


def data(rows: int = ROWS) -> dict[str, np.ndarray]:
    random = np.random.default_rng(4)
    x = random.normal(size=(rows, 24)).astype(np.float32)
    return {"x": x, "y": np.sin(x @ random.normal(size=(24, 8))).astype(np.float32)}


def loss(model: Any, batch: Any, key: Any) -> Any:
    found = jnp.tanh(batch["x"] @ model["first"]) @ model["last"] + model["shift"]
    return jnp.sum((found - batch["y"]) ** 2, axis=1)


def data_parallel(
    reduction: Any, devices: int = 4, mode: str = "shard_map", **options: Any
) -> rx.DataParallel:
    mesh = rx.make_mesh(devices=jax.devices()[:devices])
    optimizer = options.pop("optimizer", optax.adam(1e-2))
    return rx.DataParallel(loss, optimizer, mesh=mesh, mode=mode, reduction=reduction, **options)


def trained(dp: rx.DataParallel, steps: int) -> tuple[rx.TrainState, float]:
    state = dp.init(network())
    for _ in range(steps):
        state, metrics = dp.step(state, data())
    return state, float(metrics["loss"])


def is_equal_on_all_devices(tree: PyTree) -> bool:
    copies = [[np.asarray(each.data) for each in leaf.addressable_shards] for leaf in tree]
    return all(np.array_equal(each, own[0]) for own in copies for each in own)


NETWORK = Case(network, loss, data(), epochs=60)


@pytest.mark.parametrize("devices", only([4], [1, 2, 4, 8]))
@pytest.mark.parametrize("mode", only(["shard_map"], ["shard_map", "pmap"]))
@SEND
def test_training_comes_as_far_as_on_one_device(send: str, mode: str, devices: int) -> None:
    how = on(mode, data=devices, reduction=send, optimizer="slow")
    state = agrees(NETWORK, how, {"last": {"int8": 5e-4, "int4": 3e-3}[send]}).state
    assert state.reduction.shape == (devices, 24 * 40 + 40 * 8 + BLOCK)
    assert bool(np.any(state.reduction)) == (devices > 1)
    assert is_equal_on_all_devices(jax.tree.leaves(state.params))


@pytest.mark.parametrize("send", only(["int4"], ["int8", "int4"]))
def test_zero1_takes_its_part_of_the_same_total(send: str) -> None:
    whole, _ = trained(data_parallel(send), 3)
    parts, _ = trained(data_parallel(send, layout="zero1"), 3)
    assert parts.opt_state[0].mu["last"].addressable_shards[0].data.size == 40 * 8 // 4
    np.testing.assert_allclose(whole.reduction, parts.reduction, atol=1e-5)
    jax.tree.map(
        lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5),
        dict(whole.params),
        dict(parts.params),
    )


def test_micro_batches_are_summed_before_they_are_sent() -> None:
    once, _ = trained(data_parallel("int8"), 1)
    four, _ = trained(data_parallel("int8", accumulate=4), 1)
    np.testing.assert_allclose(once.reduction, four.reduction, atol=1e-4)


@pytest.mark.parametrize("devices", only([4], [2, 4, 8]))
@pytest.mark.parametrize(("send", "share"), [("int8", 0.26), ("int4", 0.14)])
def test_the_compiled_step_sends_the_bytes_of_the_formula(
    send: str, share: float, devices: int
) -> None:
    def found(reduction: str) -> float:
        lowered = data_parallel(reduction, devices).lower(network(), data())
        collectives = inspect(lowered.compile()).collectives
        return sum(wire_bytes(each, devices) for each in collectives)

    leaves = jax.tree.leaves(network())
    coded: Coded = REDUCTIONS[send]
    part = {2: 11, 4: 6, 8: 3}[devices]  # blocks, of 21
    bits = {"int8": 64 + 2, "int4": 32 + 2}[send]
    assert coded.payload_bytes(leaves, devices) == devices * part * bits
    expected = wire_bytes_of_all_reduce(devices * part * bits + 12, devices)
    assert found(send) == expected
    assert wire_bytes_of_all_reduce(sums_bytes(leaves, 1, coded, devices), devices) == expected
    assert found(send) / found("float32") == pytest.approx(share * part * devices / 20.5, rel=0.05)


def spoiled(bad: float) -> dict[str, np.ndarray]:
    batch = data()
    batch["x"] = batch["x"].copy()
    batch["x"][ROWS // 2] = bad
    return batch


@pytest.mark.parametrize("guard", [True, False], ids=["guarded", "apply_if_finite"])
def test_a_skipped_step_leaves_the_residual_as_it_was(guard: bool) -> None:
    optimizer = optax.adam(1e-2)
    dp = data_parallel(
        "int4", optimizer=optimizer if guard else optax.apply_if_finite(optimizer, 5), donate=False
    )
    state, _ = trained(dp, 2)
    dp = guarded(dp, state) if guard else dp
    after, metrics = dp.step(state, spoiled(np.nan))
    assert NOT_FINITE not in metrics or int(metrics[NOT_FINITE]) != 0
    np.testing.assert_array_equal(after.reduction, state.reduction)
    jax.tree.map(np.testing.assert_array_equal, dict(after.params), dict(state.params))
    after, metrics = dp.step(after, data())
    assert np.all(np.isfinite(after.reduction))
    assert np.isfinite(metrics["loss"])


def fitted(steps: int, run_dir: Path, devices: int = 4) -> rx.TrainState:
    dp = data_parallel("int4", devices)
    options: dict[str, Any] = {"batch_size": 24, "run_dir": run_dir, "progress": False}
    return rx.fit(dp, dp.init(network()), data(), steps=steps, **options).state


def test_a_run_resumes_with_its_residuals(tmp_path: Path) -> None:
    whole = fitted(5, tmp_path / "whole")  # steps 3 and 6 have a padded batch
    fitted(3, tmp_path / "parts")
    assert sha256(fitted(5, tmp_path / "parts")) == sha256(whole)
    assert np.all(np.any(whole.reduction, axis=1))
    with pytest.raises(rx.errors.ConfigError, match=r"reduction .*float32\[4, 1344\].*of devices"):
        fitted(6, tmp_path / "parts", devices=2)


# Names and refusals.


def test_names() -> None:
    assert {name: each.name for name, each in REDUCTIONS.items()} == {
        name: name for name in ("float32", "bfloat16", "int8", "int4")
    }
    assert REDUCTIONS["int8"] == rx.Coded("int8") != rx.Coded("int4")
    assert rx.Coded(CODECS["int4"]) == rx.Coded("int4")
    assert rx.Coded("bfloat16").name == "coded bfloat16"
    assert data_parallel(rx.Coded("int8")).configuration.names()["reduction"] == "int8"


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: Coded("sparse"), r"Coded\('int4'\).*rx\.Rounds\(every=30, send='sparse'\)"),
        (lambda: Coded("int2"), "int8, int4"),
        (lambda: data_parallel("int8", mode="jit"), "mode='shard_map'"),
        (lambda: data_parallel("int8", 1, mode="single"), "mode='shard_map'"),
        (lambda: data_parallel("int8", mode="exact"), "'int8'.*one of float32, bfloat16, or mode"),
        (lambda: data_parallel("int8", layout="fsdp"), "'int8'.*zero1"),
        (lambda: data_parallel("int8", precision="float16").init(network()), "'bfloat16'"),
        (lambda: data_parallel("bfloat"), "float32, bfloat16"),
        (lambda: data_parallel(lambda sums: sums), "float32, bfloat16"),
    ],
)
def test_what_cannot_work_is_refused(make: Callable[[], Any], match: str) -> None:
    with pytest.raises(rx.errors.ConfigError, match=match) as raised:
        make()
    assert "\n" not in str(raised.value)
