"""Groups of islands in one process, each used by a thread."""

import contextlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
from support.waiting import until

from replicax.cluster.watchdog import Timeouts
from replicax.islands.group import Group
from replicax.islands.island_place import IslandPlace
from replicax.islands.local_arrays import NOTHING

STATE = {"step": 3}, [np.arange(5.0), np.zeros((0, 2), np.int8)]


class Threads:
    """Groups of one job, whose calls run in threads."""

    def __init__(self) -> None:
        self._pool, self._groups = ThreadPoolExecutor(8), list[Group]()
        self._closing = contextlib.ExitStack()

    def start(self, place: IslandPlace, **timeouts: float) -> Group:
        self._groups.append(Group(place, Timeouts(**timeouts)))
        return self._groups[-1]

    def found(self, there: Sequence[IslandPlace], **timeouts: float) -> list[Group]:
        """Return groups that are all members and have the state."""
        found = [self.start(place, **timeouts) for place in there]
        entered = [self.enter(each) for each in found]
        until(lambda: found[0].newcomers)
        found[0].give(*STATE)
        assert [each.result(20.0) is None for each in entered] == [
            n == 0 for n in range(len(there))
        ]
        return found

    def enter(self, island: Group, **fields: Any) -> "Future[Any]":
        return self._pool.submit(island.enter, fields)

    def exchange(self, island: Group, **options: Any) -> "Future[Any]":
        return self._pool.submit(island.exchange, NOTHING, island.place.index, **options)

    def all_exchange(self, islands: Sequence[Group], **options: Any) -> None:
        notes = [each.place.index for each in islands]
        for done in [self.exchange(each, **options) for each in islands]:
            assert done.result(20.0) == ([], notes)

    def on_close(self, close: Callable[[], None]) -> None:
        self._closing.callback(close)

    def close(self) -> None:
        for each in self._groups:
            each.stops = lambda: True
            each.finish()
        self._pool.shutdown()
        self._closing.close()
