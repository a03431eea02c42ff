"""Batches that a hand-written loop passes to `dp.step` and others, in a job; prints the results."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

import replicax as rx

ROWS = {"y": np.arange(32, dtype=np.float32) ** 2}


def loss(model: Any, batch: Any, key: Any) -> Any:
    return model["w"] + batch["y"] * (1 + 0 * model["w"])


def main() -> None:
    """The mean of all rows where the processes pass the same, and errors where they do not."""
    job = rx.initialize(verbose=False)
    dp = rx.DataParallel(loss, optax.sgd(0.0), donate=False)
    state = dp.init({"w": jnp.zeros(())})
    own = {"y": ROWS["y"][job.process * 16 :][:16]}
    where = NamedSharding(dp.mesh, PartitionSpec("data"))
    joined = {"y": jax.make_array_from_process_local_data(where, own["y"])}
    calls = {
        "step": lambda batch: float(dp.step(state, batch)[1]["loss"]),
        "evaluate": lambda batch: dp.evaluate(state, [batch])["loss"],
        "predict": lambda batch: dp.predict(state, [batch], lambda m, b, k: b["y"]).mean(),
    }
    for name, batch in (("own", own), ("all", ROWS), ("joined", joined)):
        for call, run in calls.items():
            try:
                print(name, call, run(batch), flush=True)
            except rx.errors.AgreementError as error:
                print(name, call, "ProcessLocal" in str(error), "['y']" in str(error), flush=True)
    (batch,) = dp.feed(rx.ProcessLocal(own), 32)
    print("feed step", calls["step"](batch))
    here = [np.asarray(shard.data) for shard in batch.index.addressable_shards]
    print("index", *np.concatenate(here))
    print("same job", rx.initialize() is job)
    with_a_set = {**own, "few": rx.ExtraRows({"y": ROWS["y"][:3]})}
    try:
        list(dp.feed(rx.ProcessLocal([with_a_set])))
    except rx.errors.DataError as error:
        print("set of rows", str(error).partition(" in ")[0])


if __name__ == "__main__":
    main()
