"""Written arrays are restored bit for bit, on any devices and in any layout."""

import asyncio
import dataclasses
import logging
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from support.resumable import bits, data_parallel, fit, model, rows
from support.saved_checkpoint import chunks, write
from support.tiers import only

import replicax as rx
from replicax.core.ground.leaves import is_random_key
from replicax.core.ground.train_state import TrainState
from replicax.errors import CheckpointError, ConfigError
from replicax.train.checkpoints.arrays import (
    ITEM,
    abstract,
    array_entries,
    begin_writing,
    check_storable,
    read,
)
from replicax.train.checkpoints.with_orbax import finish_orbax

RULES = [("hidden", PartitionSpec(None, "data")), ("out", PartitionSpec("data"))]
OVER_MODEL = [("hidden", PartitionSpec(None, "model")), ("out", PartitionSpec("model"))]
OVER_STAGES = [("hidden", PartitionSpec("stage", "model")), ("", PartitionSpec())]
KINDS: dict[str, dict[str, Any]] = {
    "replicated": {"layout": "replicated"},
    "zero1": {"layout": "zero1"},
    "fsdp": {"layout": "fsdp"},
    "rules": {"layout": RULES},
    "fsdp on 4": {"layout": "fsdp", "devices": 4},
    "zero1 on 2": {"layout": "zero1", "devices": 2},
    "model": {"layout": OVER_MODEL, "axes": {"model": 4}},
    "fsdp and model": {
        "layout": rx.layout("fsdp", rules=OVER_MODEL),
        "axes": {"model": 2, "fsdp": 2},
    },
    "stages": {"layout": OVER_STAGES, "axes": {"stage": 2, "model": 2}},
    "hybrid in shard_map": {"mode": "shard_map", "layout": "fsdp", "axes": {"fsdp": 4}},
    "exact zero1": {"mode": "exact", "layout": "zero1"},
    "single": {"mode": "single"},
    "pmap": {"mode": "pmap"},
}


def state_of(tree: Any, mesh: Mesh | None = None) -> TrainState:
    """Return a state with `tree` for parameters, as a step holds it."""
    mesh = mesh or rx.make_mesh(devices=jax.devices()[:2])
    whole = NamedSharding(mesh, PartitionSpec())
    state = TrainState(jnp.int32(5), tree, (), {}, jnp.uint32(3))
    return jax.tree.map(lambda leaf: jax.device_put(leaf, whole), state)


@pytest.fixture(scope="module")
def trained() -> TrainState:
    """A trained state to save."""
    return fit(data_parallel(8, layout="fsdp"), steps=3).state


@pytest.mark.parametrize("first", only(["fsdp"], KINDS))
def test_every_layout_onto_every_other(tmp_path: Path, trained: TrainState, first: str) -> None:
    laid = abstract(data_parallel(**KINDS[first]).init(model()))
    state = jax.tree.map(lambda leaf, to: jax.device_put(leaf, to.sharding), trained, laid)
    write(state, tmp_path)
    for kind in KINDS.values():
        like = abstract(data_parallel(**kind).init(model()))
        found = read(like, tmp_path)
        assert bits(found) == bits(trained)
        for leaf, to in zip(jax.tree.leaves(found), jax.tree.leaves(like), strict=True):
            assert leaf.sharding.is_equivalent_to(to.sharding, leaf.ndim)


DTYPES = (
    *("bool", "int8", "int16", "int32", "uint8", "uint16", "uint32", "float16", "float32"),
    *("complex64", "bfloat16", "int4", "float8_e4m3fn", "float8_e5m2", "float8_e4m3b11fnuz"),
    *("float8_e4m3fnuz", "float8_e5m2fnuz"),
)


def test_dtypes(tmp_path: Path) -> None:
    values = np.random.default_rng(0).integers(0, 2, (3, 5))
    tree = {dtype: values.astype(jnp.dtype(dtype)) for dtype in DTYPES} | {"scalar": np.int8(1)}
    # NaNs with a payload, infinity, minus zero, a subnormal.
    patterns = np.array([0x7FC00001, 0xFFC12345, 0x7F800000, 0x80000000, 1], np.uint32)
    state = write(state_of(tree | {"bits": patterns.view(np.float32)}), tmp_path)
    found = read(abstract(state), tmp_path)
    assert all(found.params[dtype].dtype == dtype for dtype in DTYPES)
    assert bits(found) == bits(state)


def test_a_dtype_that_the_store_lacks_is_refused_before_the_first_save() -> None:
    check_storable(state_of({dtype: np.ones(1, jnp.dtype(dtype)) for dtype in DTYPES}))
    with pytest.raises(ConfigError, match=r"params\.q is uint4"):
        check_storable(state_of({"q": jnp.ones(3, jnp.uint4)}))


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_random_keys(tmp_path: Path, impl: str) -> None:
    keys = {
        "one": jax.random.key(7, impl=impl),
        "many": jax.random.split(jax.random.key(8, impl=impl), 6).reshape(2, 3),
    }
    state = write(dataclasses.replace(state_of({}), extras=keys), tmp_path)
    like = abstract(dataclasses.replace(state, extras=jax.device_put(keys, state.step.sharding)))
    found = read(like, tmp_path)
    for name, key in keys.items():
        assert is_random_key(found.extras[name])
        assert found.extras[name].dtype == key.dtype
        drawn = (jax.random.bits(jnp.ravel(each)[0]) for each in (found.extras[name], key))
        assert len(set(map(int, drawn))) == 1
    assert bits(found) == bits(state)
    assert array_entries(state) == array_entries(like)


def test_arrays_without_elements_and_scalars(tmp_path: Path) -> None:
    tree = {"none": jnp.ones((0, 4)), "also": jnp.ones((3, 0), jnp.int8), "scalar": jnp.float32(2)}
    state = write(state_of(tree), tmp_path)
    keys = chunks(tmp_path).list().result()
    assert {key for key in keys if b"params" in key} == {
        b"params.scalar/.zarray",
        b"params.scalar/0",
    }
    found = read(abstract(state), tmp_path)
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), found) == jax.tree.map(
        lambda leaf: (leaf.shape, leaf.dtype), state
    )
    assert bits(found) == bits(state)
    assert found.params["none"].sharding == state.params["none"].sharding


NAMES = {
    "slash": {"a/b": 1, "a": {"b": 2}},
    "dots": {"a.b": 1, "a": {"b": 2}, "a.": {"b": 3}, ".": 4, "..": 5, "...": 6},
    "empty": {"": 1, " ": 2, "%": 3, "%2E": 4, ".": 5},
    "lists": {"a": [1, 2], "a.0": 3, "b": ({"0": 4},)},
    "odd": {"it's": 1, '"': 2, "\\": 3, "\n": 4, "\0": 5, "~": 6, "-rf *": 7},
    "unicode": {"é": 1, "e\u0301": 2, "重み": 3, "🙂": 4},
    "case": {"w": 1, "W": 2},
    "reserved": {"_METADATA": 1, "manifest.json": 2, ".zarray": 3, "0.0": 4},
    "long": {"x" * 1000: 1, "x" * 1001: 2, "重" * 200: 3, "重" * 201: 4},
    "deep": {"/".join(["d"] * n): n for n in range(1, 20)},
}


@pytest.mark.parametrize("names", NAMES.values(), ids=NAMES)
def test_names(tmp_path: Path, names: Any) -> None:
    tree = jax.tree.map(lambda number: jnp.full(3, number, jnp.int32), names)
    state = write(state_of(tree), tmp_path)
    entries = array_entries(state)
    assert len(entries) == len(jax.tree.leaves(state))
    assert bits(read(abstract(state), tmp_path)) == bits(state)


# Memory.


@pytest.mark.parametrize("kind", only(["replicated"], ["replicated", "fsdp"]))
def test_steps_may_have_the_memory_of_what_was_read(
    tmp_path: Path, trained: TrainState, kind: str
) -> None:
    dp = data_parallel(**KINDS[kind])
    like = abstract(dp.init(model()))
    put = jax.tree.map(lambda leaf, to: jnp.copy(jax.device_put(leaf, to.sharding)), trained, like)
    write(put, tmp_path)
    found = read(like, tmp_path)
    for batch in dp.feed(rows(), 16):
        put, _ = dp.step(put, batch)
        found, _ = dp.step(found, batch)
    assert bits(found) == bits(put)


def test_what_is_written_is_what_was_when_it_was_called(tmp_path: Path) -> None:
    """Later steps write into the same memory."""
    dp = rx.DataParallel(lambda model, batch, key: (model["w"] * batch["x"]) ** 2, optax.sgd(0.1))
    state = dp.init({"w": jnp.arange(1.0, 200_001.0)})
    batch = next(iter(dp.feed({"x": np.ones((8, 200_000), np.float32)}, 8)))
    for _ in range(2):
        state, _ = dp.step(state, batch)
    wanted = bits(state)
    wait = begin_writing(state, tmp_path)
    like = abstract(state)
    for _ in range(5):
        state, _ = dp.step(state, batch)
    wait()
    finish_orbax(tmp_path / ITEM)
    assert bits(state) != wanted
    assert bits(read(like, tmp_path)) == wanted


# Others.


def test_from_within_an_event_loop(tmp_path: Path, trained: TrainState) -> None:
    """As in a notebook."""

    async def cell() -> None:
        write(trained, tmp_path)

    asyncio.run(cell())
    assert bits(read(abstract(trained), tmp_path)) == bits(trained)


def test_only_orbax_is_silenced_and_only_meanwhile(tmp_path: Path, trained: TrainState) -> None:
    logger, heard = logging.getLogger("absl"), list[logging.LogRecord]()
    before = logger.level, list(logger.filters)
    listener = logging.Handler()
    listener.emit = heard.append  # type: ignore[method-assign, assignment]
    logger.addHandler(listener)
    try:
        wait = begin_writing(trained, tmp_path / "a")
        logger.warning("mine")
        wait()
        finish_orbax(tmp_path / "a" / ITEM)
        read(abstract(trained), tmp_path / "a")
        with pytest.raises(CheckpointError):
            read(abstract(trained), tmp_path / "none")
    finally:
        logger.removeHandler(listener)
    assert [record.getMessage() for record in heard if record.levelno >= logging.WARNING] == [
        "mine"
    ]
    assert (logger.level, logger.filters) == before
