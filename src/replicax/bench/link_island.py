"""One of the islands of `bench --network`: it runs steps of each method when it is told to."""

import contextlib
import json
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import numpy as np

from replicax.bench.link_methods import ENDLESS_STEPS, LinkMethod
from replicax.core.between.islands import Islands
from replicax.core.data.batch import Batch
from replicax.core.data_parallel import DataParallel
from replicax.islands.island_job import IslandJob

ALONE = "alone"
"""The method without any exchange, with which the others are compared."""
_SETTLE_SECONDS = 0.02
"""Until the threads that send have counted the last bytes."""


class LinkIsland:
    """The steps of all methods, on one batch, so that input is not measured.

    `data_parallel` makes the `DataParallel` of a method; `model` is that of its `init`.
    """

    def __init__(
        self,
        data_parallel: Callable[[Islands | None], DataParallel],
        model: Any,
        batch: Callable[[DataParallel], Batch],
        job: IslandJob,
    ) -> None:
        self._data_parallel, self._model, self._batch_of = data_parallel, model, batch
        self._job, self._steps = job, dict[LinkMethod | None, tuple[DataParallel, Batch]]()

    def run(self, method: LinkMethod | None, steps: int, *, sends: bool) -> dict[str, float]:
        """Return the seconds of so many steps, and the bytes that were then sent.

        All islands run the same method at the same time; None: without an exchange. Unless it
        `sends`, an island takes what it would send for that of all others.
        """
        dp, batch = self._ready(method)
        state = dp.init(self._model, seed=0)
        rehearsal = contextlib.nullcontext() if sends else self._job.rehearsal()
        state, _ = jax.block_until_ready(dp.step(state, batch))
        self._together()
        with rehearsal:
            for _ in range(0 if method is None else method.steps_before - 1):
                state, _ = dp.step(state, batch)
            jax.block_until_ready(state)
            sent, started = self._sent_bytes(), time.perf_counter()
            for _ in range(steps):
                state, _ = dp.step(state, batch)
            jax.block_until_ready(state)
            seconds = time.perf_counter() - started
        if method is not None and not method.delay:  # else the next ones are on their way
            time.sleep(_SETTLE_SECONDS)
        told = {"seconds": seconds, "sent_bytes": float(self._sent_bytes() - sent)}
        self._together()
        return told

    def parameters(self) -> int:
        """Return the number of values that are exchanged."""
        dp, _ = self._ready(None)
        return sum(leaf.size for leaf in jax.tree.leaves(dp.abstract_state(self._model).params))

    def _ready(self, method: LinkMethod | None) -> tuple[DataParallel, Batch]:
        if method not in self._steps:
            dp = self._data_parallel(
                Islands(every=ENDLESS_STEPS) if method is None else method.islands
            )
            self._steps[method] = dp, self._batch_of(dp)
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
