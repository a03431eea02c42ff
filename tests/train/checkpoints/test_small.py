"""Hundreds of small arrays are packed into few files, and read from there by name."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from support.resumable import bits
from support.saved_checkpoint import chunks, sealed, write

import replicax as rx
from replicax.core.ground.train_state import TrainState
from replicax.errors import CheckpointError
from replicax.train.checkpoints.arrays import (
    ITEM,
    abstract,
    array_entries,
    begin_writing,
    params_not_finite,
    read,
)
from replicax.train.checkpoints.store import verify_checkpoint
from replicax.train.checkpoints.with_orbax import finish_orbax
from replicax.verify.step_checks import counted_compilations

DTYPES = (
    *("bfloat16", "float16", "float32", "int8", "int32", "uint8", "uint32", "bool"),
    *("complex64", "float8_e4m3fn", "int4"),
)
SPECS: dict[str, tuple[Any, ...]] = {
    "whole": (None, None),
    "rows": ("data", None),
    "columns": (None, "model"),
    "both": ("model", "data"),
    "together": (("data", "model"), None),
}


def state_of(params: Any, *spec: Any) -> TrainState:
    """Return a state with `params`, those of two dims laid out as `spec` on eight devices."""
    mesh = rx.make_mesh(model=2)

    def placed(leaf: Any) -> jax.Array:
        return jax.device_put(
            leaf, NamedSharding(mesh, PartitionSpec(*spec if jnp.ndim(leaf) == 2 else ()))
        )

    return jax.tree.map(placed, TrainState(jnp.int32(5), params, (), {}, jnp.uint32(3)))


def many() -> dict[str, Any]:
    """Return parameters of which 280 are small, 70 are empty, and one is large."""
    draw = np.random.default_rng(0)
    small = {
        f"p{n}": draw.integers(0, 2, (8, 8 * (n % 5))).astype(DTYPES[n % len(DTYPES)])
        for n in range(350)
    }
    odd = {"a/b": jnp.int8(1), ".": jnp.int8(2), "重 み": jnp.int8(3), "%": jnp.int8(4)}
    return small | {"key": jax.random.key(3), "odd": odd, "large": jnp.ones((512, 512))}


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_what_is_packed_is_restored_in_every_layout(tmp_path: Path, spec: Any) -> None:
    state = write(state_of(many(), *spec), tmp_path)
    assert sum(path.is_file() for path in tmp_path.rglob("*")) < 80
    for other in SPECS.values():
        like = abstract(state_of(many(), *other))
        found = read(like, tmp_path)
        assert bits(found) == bits(state)
        for leaf, to in zip(jax.tree.leaves(found), jax.tree.leaves(like), strict=True):
            assert leaf.sharding == to.sharding
    leaves = [leaf for leaf in jax.tree.leaves(found.params) if leaf.size and leaf.ndim == 2]
    parts = [shard.data.unsafe_buffer_pointer() for x in leaves for shard in x.addressable_shards]
    assert len(set(parts)) == len(parts)


def test_a_part_of_what_is_packed_can_be_read(tmp_path: Path) -> None:
    state = write(state_of(many(), "data"), tmp_path)
    like = abstract(state)
    part = dataclasses.replace(like, params={"p7": like.params["p7"]})
    assert bits(read(part, tmp_path))[".params['p7']"] == bits(state)[".params['p7']"]


def test_a_model_of_scalars_is_saved_and_its_infinite_one_is_named(tmp_path: Path) -> None:
    tree = {f"p{n}": jnp.float32(n) for n in range(300)}
    state = write(state_of(tree), tmp_path)
    assert bits(read(abstract(state), tmp_path)) == bits(state)
    assert params_not_finite(state) == set()
    bad = state_of({**tree, "p7": jnp.float32(np.inf), "p8": jnp.full((2**17,), np.nan)})
    assert params_not_finite(bad) == {"params.p7", "params.p8"}


def test_saving_compiles_nothing_for_small_arrays(tmp_path: Path) -> None:
    state = state_of({f"p{n}": np.ones((8 * n, 1), np.float32) for n in range(1, 300)}, "data")
    with counted_compilations() as compiled:
        assert params_not_finite(state) == set()
        begin_writing(state, tmp_path)()
    assert compiled == []


def test_steps_may_have_the_memory_of_what_is_written_and_of_what_is_read(tmp_path: Path) -> None:
    state = state_of({f"p{n}": jnp.full((64, 8), n, jnp.float32) for n in range(300)})
    step = jax.jit(lambda tree: jax.tree.map(lambda leaf: 2 * leaf + 1, tree), donate_argnums=0)
    wanted, like = bits(state), abstract(state)
    wait = begin_writing(state, tmp_path)
    for _ in range(3):
        state = step(state)
    wait()
    finish_orbax(tmp_path / ITEM)
    found = read(like, tmp_path)
    assert bits(found) == wanted
    for _ in range(3):
        found = step(found)
    assert bits(found) == bits(state) != wanted


def test_a_small_array_that_is_cut_or_missing_is_found_by_its_size(tmp_path: Path) -> None:
    state = state_of({f"p{n}": jnp.float32(n) for n in range(300)})
    entries = array_entries(write(state, tmp_path))
    longer = {**entries, "params.p9": dataclasses.replace(entries["params.p9"], shape=(2,))}
    with pytest.raises(CheckpointError, match=r"^params.p9 .*\[\].*\[2\]"):
        verify_checkpoint(tmp_path, sealed(tmp_path, arrays=longer))
    del chunks(tmp_path)["params.p9/0"]
    with pytest.raises(CheckpointError, match=r"^params.p9 .*0 .*1 "):
        verify_checkpoint(tmp_path, sealed(tmp_path, arrays=entries))


def test_files_that_tensorstore_cannot_read_are_told_in_one_line(tmp_path: Path) -> None:
    state = write(state_of({f"p{n}": jnp.float32(n) for n in range(300)}), tmp_path)
    (tmp_path / ITEM / "manifest.ocdbt").write_bytes(b"damaged")
    with pytest.raises(CheckpointError, match=r"^[^\n]*default[^\n]*$"):
        verify_checkpoint(tmp_path, sealed(tmp_path, arrays=array_entries(state)))
    with pytest.raises(CheckpointError, match=r"^[^\n]*default[^\n]*$"):
        read(abstract(state), tmp_path)
