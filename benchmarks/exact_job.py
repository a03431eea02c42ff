"""One process of a job that trains a subject in mode `exact`; process 0 prints the result.

    python exact_job.py SUBJECT DEVICES ACCUMULATE STEPS [DEVICES_AFTER]

With DEVICES_AFTER, the second half of the steps runs on that many devices, from the state after the
first half.
"""

import json
import sys
from collections.abc import Iterator
from typing import Any

import exact_subjects
import jax

import replicax as rx
from replicax.core.ground.job import Job
from replicax.core.modes.exact.fixed_tree import fix_threads
from replicax.train.files.fingerprint import sha256
from replicax.train.run.host_memory import keep_freed_memory


def main() -> None:
    """Train, and print the digests of the state and of its weights, and the last loss."""
    name = sys.argv[1]
    devices, accumulate, steps, *after = map(int, sys.argv[2:])
    fix_threads(exact_subjects.MICRO_SHARDS)
    job = rx.initialize(verbose=False)
    jax.config.update("jax_num_cpu_devices", max([devices, *after]) // job.processes)
    keep_freed_memory()
    subject = exact_subjects.subject(name)
    cut = steps // 2 if after else steps
    state, metrics = _train(subject, job, devices, accumulate, None, 0, cut)
    for count in after:
        state, metrics = _train(subject, job, count, 1, jax.device_get(state), cut, steps)
    if job.process == 0:
        loss = float(metrics["loss"])
        result = {"state": sha256(state), "weights": sha256(state.params), "loss": loss}
        print("RESULT", json.dumps(result), flush=True)


def _train(
    subject: Any,
    job: Job,
    devices: int,
    accumulate: int,
    host_state: Any,
    first: int,
    last: int,
) -> Any:
    """Return the state after steps `first` to `last`, and the metrics of the last step."""
    dp = rx.DataParallel(
        subject.loss,
        exact_subjects.optimizer(),
        mesh=rx.make_mesh(data=devices),
        mode="exact",
        accumulate=accumulate,
        micro_shards=exact_subjects.MICRO_SHARDS,
        job=job,
    )
    state = dp.init(subject.model(), seed=1)
    if host_state is not None:
        state = jax.tree.map(lambda new, old: jax.device_put(old, new.sharding), state, host_state)
    for number, batch in enumerate(_batches(dp, subject)):
        if number == last:
            break
        if number >= first:
            state, metrics = dp.step(state, batch)
    return state, metrics


def _batches(dp: rx.DataParallel, subject: Any) -> Iterator[rx.Batch]:
    epoch = 0
    while True:
        yield from dp.feed(subject.source, subject.batch_size, shuffle=True, seed=2, epoch=epoch)
        epoch += 1


if __name__ == "__main__":
    main()
