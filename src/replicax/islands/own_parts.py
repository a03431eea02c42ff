"""The parts of an exchange that this island computes."""

from collections.abc import Callable, Collection, Mapping
from typing import Generic

import numpy as np

from replicax.core.ground.job import Parts, Value
from replicax.islands.parts import Block, added, blocks_of, covered, within


class OwnParts(Generic[Value]):
    """The values that this island has computed for an exchange."""

    def __init__(self, parts: Parts[Value], note: Callable[[int], None]) -> None:
        self.parts, self._note = parts, note
        self._known: dict[Block, Value] = {}
        self._sent: set[Block] = set()

    def __getitem__(self, block: Block) -> Value:
        return self._known[block]

    def missing(self, chosen: Collection[int]) -> tuple[list[Block], list[np.ndarray]]:
        """Compute what this island has not sent yet of the `chosen` parts; return it."""
        missing = set(chosen) - covered(block for block in self._sent if within(block, chosen))
        blocks = blocks_of(missing, self.parts.count)
        if self.parts.add is None:
            blocks = [(part, 1) for part in sorted(missing)]
        arrays = [array for block in blocks for array in self.parts.to_host(self._value(block))]
        self._sent |= set(blocks)
        return blocks, arrays

    def combined(self, known: Mapping[Block, Value]) -> list[Value]:
        """Return the sum of all parts, or their values in order."""
        if self.parts.add is not None:
            return [added((0, self.parts.count), known, self.parts.add)]
        return [known[part, 1] for part in range(self.parts.count)]

    def _value(self, block: Block) -> Value:
        if block not in self._known:
            first, size = block
            if size == 1:
                self._known[block] = self.parts.compute(first)
                self._note(first)
            else:
                assert self.parts.add is not None
                halves = (first, size // 2), (first + size // 2, size // 2)
                self._known[block] = self.parts.add(*map(self._value, halves))
                for half in set(halves) - self._sent:
                    del self._known[half]
        return self._known[block]
