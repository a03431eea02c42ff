"""Orbax alone finds and restores the steps of a run, and a run's weights come from Orbax."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from orbax.checkpoint.experimental import v1
from support.resumable import bits, data_parallel, fit, model
from support.saved_checkpoint import write

import replicax as rx
from replicax.core.ground.train_state import TrainState
from replicax.errors import ConfigError
from replicax.train.checkpoints.arrays import abstract
from replicax.train.checkpoints.orbax_folder import read_orbax

pytestmark = pytest.mark.filterwarnings("ignore:Sharding info not provided")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, rx.types.Fit]:
    """A run that was saved at steps 3 and 5, fsdp on eight devices."""
    folder = tmp_path_factory.mktemp("run") / "run"
    return folder, fit(data_parallel(8, layout="fsdp"), folder, steps=5)


@pytest.mark.promise("checkpoints.orbax")
def test_its_manager_finds_and_restores_the_steps(made: tuple[Path, rx.types.Fit]) -> None:
    folder, result = made
    like = abstract(data_parallel(1, mode="single").init(model()))
    for args in (ocp.args.StandardRestore(like), ocp.args.PyTreeRestore(like)):
        with ocp.CheckpointManager(folder / "checkpoints") as manager:
            assert manager.all_steps() == [3, 5]
            assert bits(manager.restore(manager.latest_step(), args=args)) == bits(result.state)
    with ocp.CheckpointManager(folder / "checkpoints") as manager:
        as_dict = {name: getattr(like, name) for name in vars(like) if name != "definition"}
        found = manager.restore(5, args=ocp.args.StandardRestore(as_dict))
        assert jax.tree.structure(found["opt_state"]) == jax.tree.structure(like.opt_state)
        assert manager.restore(5)["params"].keys() == {"hidden", "out"}


def test_version_1_finds_and_restores_the_steps(made: tuple[Path, rx.types.Fit]) -> None:
    folder, result = made
    like = abstract(data_parallel(1, mode="single").init(model()))
    with v1.training.Checkpointer(folder / "checkpoints") as checkpointer:
        assert [each.step for each in checkpointer.checkpoints] == [3, 5]
        found = checkpointer.load(abstract_state=like, checkpointable_name="default")
    assert bits(found) == bits(result.state)
    assert bits(v1.load(folder / "checkpoints/5", like)) == bits(result.state)


def test_hundreds_of_small_arrays_are_one_tree(tmp_path: Path) -> None:
    params = {"a": [{"b": jnp.full((3,), n)} for n in range(300)], "large": jnp.ones((512, 512))}
    params |= {"key": jax.random.key(3), "none": jnp.ones((0, 3)), "x.y/z": jnp.ones(3)}
    state = TrainState(jnp.int32(5), params, optax.EmptyState(), {}, jnp.uint32(3))
    write(jax.device_put(state, rx.make_mesh().devices.flat[0]), tmp_path / "20")
    with ocp.CheckpointManager(tmp_path) as manager:
        found = manager.restore(20)
    assert [each["b"].tolist() for each in found["params"]["a"]] == [[n] * 3 for n in range(300)]
    assert found["params"].keys() == params.keys()
    assert np.array_equal(found["params"]["key"], jax.random.key_data(params["key"]))
    assert found["params"]["large"].shape == (512, 512)
    assert found["params"]["none"] is None


TREE = {
    "dense": {"kernel": np.arange(6.0).reshape(2, 3), "bias": np.ones(3)},
    "list": [np.array([7])],
}
FLAT = {"dense.kernel": (2, 3), "dense.bias": (3,), "list.0": (1,)}


@pytest.mark.parametrize("kind", ["standard", "manager", "state", "items", "version 1"])
def test_what_orbax_wrote_elsewhere_is_read(tmp_path: Path, kind: str) -> None:
    if kind == "standard":
        with ocp.StandardCheckpointer() as writer:
            writer.save(tmp_path / "at", TREE)
    elif kind == "version 1":
        with v1.training.Checkpointer(tmp_path / "at") as checkpointer:
            checkpointer.save(7, TREE)
    else:
        state = {"params": TREE, "opt_state": {"mu": TREE}, "step": np.array(1)}
        saved: Any = ocp.args.StandardSave(TREE if kind == "manager" else state)
        if kind == "items":
            saved = ocp.args.Composite(one=saved, other=saved)
        with ocp.CheckpointManager(tmp_path / "at") as manager:
            for step in (9, 10):
                manager.save(step, args=saved, force=True)
    if kind == "items":
        with pytest.raises(ConfigError, match=r"\b2 .*one, other"):
            read_orbax(tmp_path / "at")
    folder = tmp_path / ("at/10/one" if kind == "items" else "at")
    found = read_orbax(folder)
    assert {name: array.shape for name, array in found.items()} == FLAT
    assert np.array_equal(found["dense.kernel"], TREE["dense"]["kernel"])


def test_the_weights_of_a_run_are_read(made: tuple[Path, rx.types.Fit]) -> None:
    folder, result = made
    found = read_orbax(folder)
    assert found.keys() == {"hidden", "out"}
    assert np.array_equal(found["out"], result.state.params["out"])


def test_a_folder_without_arrays_is_refused(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "none"):
        with pytest.raises(ConfigError, match="Orbax wrote"):
            read_orbax(folder)
