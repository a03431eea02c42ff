"""One of the islands of slow_links.py: it runs steps of each method when it is told to.

    python slow_links_island.py SETTINGS

`SETTINGS` are JSON: `every`, the steps of a round, and `layers` and `width` of the model.
"""

import contextlib
import json
import os
import queue
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import numpy as np
from slow_links_methods import LinkMethod, link_methods

import replicax as rx
from replicax.core.between.rounds import Rounds
from replicax.islands.island_job import IslandJob
from replicax.recipes.gpt2 import GPT2
from replicax.train.run.host_memory import keep_freed_memory

ALONE = "alone"
"""The method without any exchange, with which the others are compared."""
LINK_CONTROL = "BENCH_CONTROL"
"""Environment variable with the descriptor on which an island is told what to run, and its
cores."""
_ENDLESS_STEPS = 1_000_000_000
"""Steps of a round that does not end while it is measured."""
_SETTLE_SECONDS = 0.02
"""Until the threads that send have counted the last bytes."""


class LinkIsland:
    """The steps of all methods, on one batch with a row for each part."""

    def __init__(self, job: IslandJob, every: int, **sizes: int) -> None:
        # As few parts as possible: one for each island, if these are a power of two.
        self._parts = 1 << (job.count - 1).bit_length()
        self._recipe = GPT2(batch_size=self._parts, context=32, **sizes)
        self._model = self._recipe.model(jax.random.key(0))
        self._job, self._methods = job, link_methods(every)
        alone = LinkMethod(ALONE, Rounds(every=_ENDLESS_STEPS))
        self._methods[ALONE] = alone
        self._steps: dict[LinkMethod, Any] = {}

    def answer(self, question: dict[str, Any]) -> dict[str, Any]:
        """Run what is asked for; without a method, return the shapes of what is exchanged."""
        if not question:
            params = self._ready(self._methods[ALONE])[0].abstract_state(self._model).params
            return {"shapes": [leaf.shape for leaf in jax.tree.leaves(params)]}
        method, sends = self._methods[question["method"]], question["sends"]
        return self.run(method if sends else method.own_work, question["steps"], sends=sends)

    def run(self, method: LinkMethod, steps: int, *, sends: bool) -> dict[str, float]:
        """Return the seconds of so many steps, and the bytes that were then sent.

        All islands run the same method at the same time. Unless it `sends`, an island takes what it
        would send for that of all others.
        """
        dp, batch = self._ready(method)
        state = dp.init(self._model, seed=0)
        dry_run = contextlib.nullcontext() if sends else self._job.dry_run()
        state, _ = jax.block_until_ready(dp.step(state, batch))
        self._together()
        with dry_run:
            for _ in range(method.steps_before - 1 if method.name != ALONE else 0):
                state, _ = dp.step(state, batch)
            jax.block_until_ready(state)
            sent, started = self._sent_bytes(), time.perf_counter()
            for _ in range(steps):
                state, _ = dp.step(state, batch)
            jax.block_until_ready(state)
            seconds = time.perf_counter() - started
        if not method.schedule.delay:  # else the next ones are on their way
            time.sleep(_SETTLE_SECONDS)
        told = {"seconds": seconds, "sent_bytes": float(self._sent_bytes() - sent)}
        self._together()
        return told

    def _ready(self, method: LinkMethod) -> Any:
        if method not in self._steps:
            dp = rx.DataParallel(
                self._recipe.loss,
                self._recipe.optimizer(),
                mode="jit",
                job=self._job,
                rounds=method.rounds,
                micro_shards=self._parts,
            )
            batch = next(iter(dp.feed(self._recipe.train_source(), self._recipe.batch_size)))
            self._steps[method] = dp, batch
        return self._steps[method]

    def _together(self) -> None:
        """Wait for all islands, and for what is under way in the background."""
        self._job.share([np.zeros(1, np.uint8)])()

    def _sent_bytes(self) -> int:
        group = self._job.group
        assert group is not None
        return group.bytes[0] + sum(peer.sent_bytes for peer in group.network.peers.values())


def answer_lines(answer: Callable[[dict[str, Any]], dict[str, Any]], descriptor: int) -> None:
    """Answer each line of JSON on a socket with another, until the other end closes it.

    Then the process ends at once, even in the middle of an exchange with islands that are gone.
    """
    with socket.socket(fileno=descriptor) as connected:
        for line in _lines_or_end(connected.makefile()):
            connected.sendall(json.dumps(answer(json.loads(line))).encode() + b"\n")


def _lines_or_end(stream: Iterable[str]) -> Iterator[str]:
    found: queue.SimpleQueue[str] = queue.SimpleQueue()

    def read() -> None:
        for line in stream:
            found.put(line)
        os._exit(1)

    threading.Thread(target=read, daemon=True).start()
    while True:
        yield found.get()


def main() -> None:
    descriptor, cores = os.environ[LINK_CONTROL].split()
    os.sched_setaffinity(0, map(int, cores.split(",")))  # before JAX counts them
    job = rx.initialize(verbose=False)
    assert isinstance(job, IslandJob)
    keep_freed_memory()
    answer_lines(LinkIsland(job, **json.loads(sys.argv[1])).answer, int(descriptor))


if __name__ == "__main__":
    main()
