"""Fingerprints of a state on every device: changes that they detect, and whom they name."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from support.bit_flips import flip, flip_leaf, leaf_names, part_bytes
from support.cases import CASES
from support.training import train

import replicax as rx
from replicax.core.placement.mesh import replicated
from replicax.train.files.fingerprint import Fingerprint, UnequalCopies, fingerprint

DTYPES = ("float32", "bfloat16", "float16", "int32", "uint8", "int8", "bool", "complex64", "int4")


def place(value: Any, *axes: str | None, mesh: Any = None) -> jax.Array:
    mesh = rx.make_mesh() if mesh is None else mesh
    placed: jax.Array = jax.device_put(value, NamedSharding(mesh, PartitionSpec(*axes)))
    return placed


def differences(state: Any) -> list[UnequalCopies]:
    found = Fingerprint(state)
    return found.differences(found.take(state))


@pytest.fixture(scope="module")
def trained() -> Any:
    """A state after a step: batch statistics, keys, counters, moments."""
    dp = rx.DataParallel(CASES["nnx"].loss, optax.adamw(1e-3), mode="shard_map")
    return train(dp, CASES["nnx"].model(), dp.feed(CASES["nnx"].source, 64))[0]


def test_a_bit_in_any_leaf_names_leaf_and_device(trained: Any) -> None:
    for number, name in enumerate(leaf_names(trained)):
        last = part_bytes(jax.tree.leaves(trained)[number]) - 1
        flipped = flip_leaf(trained, number, jax.devices()[5], last, 7)
        (found,) = differences(flipped)
        assert (found.leaf, found.wrong) == (name, (5,))


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_bit_of_every_dtype_is_seen(dtype: str) -> None:
    array = jnp.asarray(np.arange(12).reshape(3, 4) % 2, dtype)
    own = jax.jit(fingerprint)
    before = np.asarray(own(array))
    host = np.asarray(array)
    bits = {"bool": 1, "int4": 4}.get(dtype, 8)  # the others of their bytes mean nothing
    for byte in range(host.nbytes):
        for bit in range(bits):
            changed = host.copy()
            changed.reshape(-1).view(np.uint8)[byte] ^= np.uint8(1 << bit)
            assert (np.asarray(own(jnp.asarray(changed))) != before).all()


def test_places_count() -> None:
    own = jax.jit(fingerprint)
    random = np.random.default_rng(0).normal(size=1000).astype(np.float32)
    seen = {np.asarray(own(random)).tobytes()}
    for first, second in ((0, 1), (0, 999), (3, 515), (256, 512)):
        swapped = random.copy()
        swapped[[first, second]] = swapped[[second, first]]
        seen.add(np.asarray(own(swapped)).tobytes())
    assert len(seen) == 5


def test_two_flipped_signs_do_not_cancel() -> None:
    own = jax.jit(fingerprint)
    ones = np.ones(64, np.float32)
    before = np.asarray(own(ones))
    for second in range(1, 64):
        changed = ones.copy()
        changed[[0, second]] = -1
        assert (np.asarray(own(changed)) != before).any()


def test_the_most_outvote_and_without_a_majority_nobody_is_wrong() -> None:
    state = {"w": place(np.ones(4, np.float32))}
    devices = jax.devices()
    twice = flip(flip(state["w"], devices[1], 0, 0), devices[6], 3, 3)
    (found,) = differences({"w": twice})
    assert found.wrong == (1, 6)
    assert [len(group) for group in found.groups] == [6, 1, 1]
    for device in devices[:4]:
        state["w"] = flip(state["w"], device, 0, 0)
    (found,) = differences(state)
    assert found.wrong is None
    assert sorted(map(sorted, found.groups)) == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_what_one_device_alone_holds_is_told_and_not_compared() -> None:
    state = {"all": place(np.ones(8, np.float32)), "own": place(np.ones(16, np.float32), "data")}
    found = Fingerprint(state)
    assert found.compared == ["['all']"]
    assert (found.compared_bytes, found.alone_bytes) == (32, 8)
    state["own"] = flip(state["own"], jax.devices()[2], 0, 0)
    assert differences(state) == []


def test_parts_over_model_are_compared_along_data() -> None:
    mesh = rx.make_mesh(data=4, model=2)
    state = {"w": place(np.arange(8, dtype=np.float32), "model", mesh=mesh)}
    assert differences(state) == []
    assert Fingerprint(state).compared_bytes == 16
    state["w"] = flip(state["w"], jax.devices()[3], 0, 0)
    (found,) = differences(state)
    assert found.wrong == (3,)
    assert found.groups == ((1, 5, 7), (3,))


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_numbers_that_are_not_finite_are_told(value: float) -> None:
    state = {"a": place(np.ones(3, np.float32)), "b": place(np.float32([1, value]))}
    found = Fingerprint(state)
    assert found.not_finite(found.take(state)) == ("['b']",)


def test_nothing_is_moved_between_devices_but_the_fingerprints() -> None:
    from replicax.analysis.hlo import instructions
    from replicax.train.files.fingerprint import _sums, of_each_device

    mesh = rx.make_mesh()
    shape = jax.ShapeDtypeStruct((1000, 100), jnp.float32, sharding=replicated(mesh))
    compiled = of_each_device(_sums, mesh, (PartitionSpec(),)).lower([shape]).compile()
    moved = [each for each in instructions(compiled.as_text()) if each.opcode.startswith("all-")]
    assert len(moved) == 1
    assert "100" not in moved[0].shape
