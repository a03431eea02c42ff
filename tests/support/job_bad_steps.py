"""Guarded steps in a job: example 17 is NaN, and from the third epoch on all are."""

import jax.numpy as jnp
import numpy as np
import optax
from support.job_cases import FEATURES, loss, model

import replicax as rx
from replicax.cli import _explain
from replicax.cluster.failure import end
from replicax.train.dispatched import RunPosition, dispatched, finished
from replicax.train.guarded import guarded
from replicax.train.run.step_records import BadSteps


def source(epoch: int) -> dict[str, np.ndarray]:
    """Four batches of 8."""
    random = np.random.default_rng(7)
    x = random.normal(size=(32, FEATURES)).astype(np.float32)
    x[17 if epoch < 2 else slice(None)] = np.nan
    return {"x": x, "y": random.normal(size=32).astype(np.float32), "weight": np.ones(32, "f4")}


def main() -> None:
    """Return the skipped steps, and the norm of the weights after each epoch."""
    job = rx.initialize(verbose=False)
    dp = rx.DataParallel(loss, optax.adamw(1e-2), mode="shard_map", job=job)
    state = dp.init(model())
    dp, bad, step = guarded(dp, state), BadSteps(2, job), 0
    for epoch in range(4):
        for batch in dp.feed(source(epoch), 8, epoch=epoch):
            state, metrics = dp.step(state, batch)
            step += 1
            job.in_flight.note(dispatched(RunPosition(step, epoch, step % 4), batch, metrics))
            for record in (r for done in finished(job.in_flight, 4) for r in bad.finished(done)):
                examples = ",".join(map(str, record.examples or ()))
                print(record.kind, record.step, record.epoch, examples, record.rows, flush=True)
            bad.check()
        norm = jnp.linalg.norm(dp.model(state)["in"])
        print(f"norm {float(norm)!r} after {int(state.step)}", flush=True)


if __name__ == "__main__":
    try:
        main()
    except rx.ReplicaxError as error:  # as the command line does
        end(error, _explain(error))
