"""A job that saves into an object store and restores from there: `OBJECTS`, a folder."""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from support.object_store import register
from support.saved_checkpoint import POSITION

import replicax as rx
from replicax.core.ground.train_state import TrainState
from replicax.train.checkpoints.arrays import abstract, array_entries, read
from replicax.train.checkpoints.saver import Saver
from replicax.train.checkpoints.store import Store
from replicax.train.files.places import place


def made() -> TrainState:
    """Return a state of which each process holds a part."""
    mesh = rx.make_mesh()
    split, whole = (NamedSharding(mesh, PartitionSpec(*spec)) for spec in (["data"], []))

    def put(array: np.ndarray, where: NamedSharding) -> jax.Array:
        return jax.make_array_from_callback(array.shape, where, lambda part: array[part])

    params = {"split": put(np.arange(2.0**17, dtype=np.float32), split)}
    params["whole"] = put(np.arange(7.0, dtype=np.float32), whole)
    params |= {f"small{n}": put(np.full((4, n % 3 + 1), n, np.float16), split) for n in range(300)}
    return TrainState(put(np.int32(120), whole), params, (), {}, put(np.uint32(3), whole))


def main() -> None:
    """Save, restore and compare."""
    job = rx.initialize(verbose=False)
    register(Path(sys.argv[1]))
    state, folder = made(), place("s3://bucket/run/checkpoints")
    saver = Saver(Store(folder, 3, None), 1, lambda: None, job, 0, {})
    saver.save(state, POSITION, {})
    assert saver.wait(), saver.poll()
    store = Store(folder, 3, None)

    def found() -> str:
        good = store.newest_good(array_entries(state), print)
        assert good is not None
        return good[0].name

    name = job.broadcast("the checkpoint", found)
    restored = read(abstract(state), store.local(folder / name))
    equal = jax.tree.map(lambda one, other: jnp.array_equal(one, other), restored, state)
    print("equal" if all(map(bool, jax.tree.leaves(equal))) else "different")


if __name__ == "__main__":
    main()
