"""Islands that are simulated in one process, to compare their bits with one device."""

from typing import Any

from replicax.core.ground.job import Alone, Parts, Value
from replicax.islands.messages import View
from replicax.islands.own_parts import OwnParts
from replicax.islands.parts import added, assigned


class SimulatedIslands(Alone):
    """A job of several islands, which compute their parts one after the other.

    Each sends its maximal subtrees through host memory, as over a network.
    """

    def __init__(self, islands: int = 1) -> None:
        super().__init__()
        self.islands = islands
        self.exchanges = 0

    def exchange(self, parts: Parts[Value], /) -> list[Value]:
        self.exchanges += 1
        view = View(0, [(n, "") for n in range(self.islands)], range(self.islands), self.exchanges)
        known: dict[Any, Value] = {}
        for own in assigned(view, self.exchanges, parts.count).values():
            blocks, arrays = OwnParts(parts, lambda _: None).missing(own)
            each = len(arrays) // max(len(blocks), 1)
            for n, block in enumerate(blocks):
                copies = [array.copy() for array in arrays[n * each : (n + 1) * each]]
                known[block] = parts.from_host(copies)
        if parts.add is None:
            return [known[part, 1] for part in range(parts.count)]
        return [added((0, parts.count), known, parts.add)]
