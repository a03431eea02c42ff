"""Islands that are simulated in one process, to compare their bits with one device."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar, cast

import numpy as np

from replicax.core.ground.job import Alone, Parts, PartsExchange, Value
from replicax.core.ground.leaves import PyTree
from replicax.islands.local_parts import LocalParts
from replicax.islands.messages import View
from replicax.islands.parts import added, assigned

_Result = TypeVar("_Result")
_SECONDS = 600.0


class SimulatedIslands(Alone):
    """A job of several islands, which compute their parts one after the other.

    Each sends its maximal subtrees through host memory, as over a network.
    """

    def __init__(self, islands: int = 1) -> None:
        super().__init__()
        self.count, self.exchanges, self.peers = islands, 0, cast(Any, self)

    def compare(self, about: str, arrays: PyTree) -> None: ...

    def exchange(self, parts: Parts[Value], /) -> list[Value]:
        self.exchanges += 1
        view = View(0, [(n, "") for n in range(self.count)], range(self.count), self.exchanges)
        known: dict[Any, Value] = {}
        for own in assigned(view, self.exchanges, parts.count).values():
            blocks, arrays = LocalParts(parts, lambda _: None).missing(own)
            each = len(arrays) // max(len(blocks), 1)
            for n, block in enumerate(blocks):
                copies = [array.copy() for array in arrays[n * each : (n + 1) * each]]
                known[block] = parts.from_host(copies)
        if parts.add is None:
            return [known[part, 1] for part in range(parts.count)]
        return [added((0, parts.count), known, parts.add)]


class SharingIsland(Alone):
    """The job of one of several islands, each in a thread of its own, that share arrays."""

    exchange: PartsExchange | None = None

    def __init__(
        self, rank: int, sent: list[list[list[np.ndarray]]], news: threading.Condition
    ) -> None:
        super().__init__()
        self._sent, self._news, self._own = sent, news, sent[rank]
        self.count, self.span, self.peers = len(sent), (rank, len(sent)), self

    def compare(self, about: str, arrays: PyTree) -> None: ...

    def share(
        self, arrays: list[np.ndarray], *, later: bool = False
    ) -> Callable[[], list[list[np.ndarray]]]:
        number = len(self._own)
        with self._news:
            self._own.append(arrays)
            self._news.notify_all()

        def found() -> list[list[np.ndarray]]:
            with self._news:
                if not self._news.wait_for(
                    lambda: all(len(each) > number for each in self._sent), _SECONDS
                ):
                    raise TimeoutError("another island has ended")
            return [each[number] for each in self._sent]

        return found


def on_sharing_islands(count: int, run: Callable[[SharingIsland], _Result]) -> list[_Result]:
    """Return the results of `run(job)` on each of `count` islands, at the same time."""
    news, sent = threading.Condition(), [list[list[np.ndarray]]() for _ in range(count)]
    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(run, [SharingIsland(rank, sent, news) for rank in range(count)]))
