"""`fit` with audits in a job: `PROCESS STEP ON_DIVERGENCE`, a bit of `PROCESS`'s last device."""

import sys
from functools import partial

import jax
import numpy as np
import optax
from support.bit_flips import before_step, flip_leaf, leaf_names
from support.job_cases import DATA, loss, model

import replicax as rx
from replicax.cli import _explain
from replicax.cluster.failure import end


def main() -> None:
    """Take twelve steps with an audit every four; returns the norm of the weights."""
    job = rx.initialize(verbose=False)
    process, step, on_divergence = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    dp = rx.DataParallel(loss, optax.adamw(1e-2), mode="shard_map", job=job)
    state = dp.init(model())
    device = [each for each in jax.devices() if each.process_index == process][-1]
    leaf = leaf_names(state).index("params['in']")
    change = partial(flip_leaf, leaf=leaf, device=device, byte=5, bit=6)
    audit = rx.hooks.Audit(4, on_divergence)
    with before_step(step, change):
        result = rx.fit(dp, state, DATA, batch_size=16, steps=12, hooks=[audit])
    norm = float(np.linalg.norm(np.asarray(dp.model(result.state)["in"])))
    print(f"norm {norm!r} after {audit.restores} restores", flush=True)


if __name__ == "__main__":
    try:
        main()
    except rx.ReplicaxError as error:  # as the command line does
        end(error, _explain(error))
