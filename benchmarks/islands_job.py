"""One process of a job, or one island, that trains GPT `nano` for islands.py.

    python islands_job.py MODE ROWS

Answers a number of steps with their seconds, and the bytes that an island sent and received.
"""

import sys
import time
from functools import partial
from typing import Any

import jax
from process_group import serve

import replicax as rx
from replicax.islands.island_job import IslandJob
from replicax.recipes.gpt2 import GPT2
from replicax.train.files.fingerprint import sha256
from replicax.train.run.host_memory import keep_freed_memory

SETTLE_SECONDS = 0.05
"""Before bytes are read, until the threads that send have counted the last ones."""


def prepare(mode: str, rows: int) -> Any:
    """Prepare a process, which uses its part of one fixed batch."""
    job = rx.initialize(verbose=False)
    keep_freed_memory()
    recipe = GPT2(batch_size=rows)
    data = {name: array[:rows] for name, array in recipe.train_source().items()}
    dp = rx.DataParallel(recipe.loss, recipe.optimizer(), mode=mode, job=job)
    state = dp.init(recipe.model(jax.random.key(0)))
    (batch,) = dp.feed(data, rows)
    shapes = [leaf.shape for leaf in jax.tree.leaves(state.params)]

    def exchanged() -> tuple[int, int]:
        """Return the bytes sent to and received from other islands so far."""
        if not isinstance(job, IslandJob):
            return 0, 0
        peers = job.group.network.peers.values()
        return sum(p.sent_bytes for p in peers), sum(p.received_bytes for p in peers)

    def steps(count: int) -> dict[str, Any]:
        nonlocal state
        job.move()
        state, metrics = jax.block_until_ready(dp.step(state, batch))  # synchronizes all
        time.sleep(SETTLE_SECONDS)
        before = exchanged()
        processor, started = time.process_time(), time.perf_counter()
        for _ in range(count):
            state, metrics = dp.step(state, batch)
        jax.block_until_ready(state)
        seconds = time.perf_counter() - started
        processor = time.process_time() - processor
        time.sleep(SETTLE_SECONDS)
        sent, received = (now - then for now, then in zip(exchanged(), before, strict=True))
        job.rest()
        return {
            "seconds": seconds / count,
            "processor_seconds": processor / count,
            "sent": sent / count,
            "received": received / count,
            "loss": float(metrics["loss"]),
            "weights": sha256(state.params)[:16],
        }

    return {"shapes": shapes}, steps


def main() -> None:
    mode, rows = sys.argv[1:]
    serve(partial(prepare, mode, int(rows)))


if __name__ == "__main__":
    main()
