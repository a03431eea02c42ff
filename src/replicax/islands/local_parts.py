"""The parts of an exchange that this island computes."""

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Generic

import numpy as np

from replicax.core.ground.job import Parts, Value
from replicax.errors import AgreementError
from replicax.islands.founding import disagreement
from replicax.islands.messages import Frame, View
from replicax.islands.parts import Block, added, assigned, blocks_of, covered, within

Frames = Mapping[int, Sequence[tuple[Frame, list[np.ndarray]]]]
"""Frames of an exchange with their arrays, by the index of their sender; own ones without."""

BlockArrays = Mapping[Block, list[np.ndarray] | None]
"""The arrays of blocks that others computed; None for those of this island."""


class LocalParts(Generic[Value]):
    """The values that this island has computed for an exchange."""

    def __init__(self, parts: Parts[Value], note: Callable[[int], None]) -> None:
        self.parts, self._note = parts, note
        self._known: dict[Block, Value] = {}
        self._sent: set[Block] = set()

    def missing(self, chosen: Collection[int]) -> tuple[list[Block], list[np.ndarray]]:
        """Compute and return what this island has not sent yet of the `chosen` parts."""
        missing = set(chosen) - covered(block for block in self._sent if within(block, chosen))
        blocks = blocks_of(missing, self.parts.count)
        if self.parts.add is None:
            blocks = [(part, 1) for part in sorted(missing)]
        arrays = [array for block in blocks for array in self.parts.to_host(self._value(block))]
        return blocks, arrays

    def sent(self, blocks: Collection[Block]) -> None:
        """Note that these blocks were sent to all members."""
        self._sent |= set(blocks)

    def combined(self, view: View, exchange: int, frames: Frames) -> tuple[list[Value], list[Any]]:
        """Return the sum of all parts, or their values in order; and the notes of all members.

        Of each member only the parts count that it computes in `view`, so that all use the same.
        """
        chosen = assigned(view, exchange, self.parts.count)
        values: dict[Block, list[np.ndarray] | None] = {}
        notes = {}
        for index, _ in view.members:
            for frame, arrays in frames[index]:
                per_block = len(arrays) // max(len(frame.blocks), 1)
                for number, block in enumerate(frame.blocks):
                    if within(block, chosen[index]):
                        given = arrays[number * per_block : (number + 1) * per_block]
                        is_own = block in self._known and not given
                        values[block] = None if is_own else given
                if frame.view == view.number:
                    notes[index] = json.loads(frame.note)
        return self.result(values), [notes[index] for index, _ in view.members]

    def result(self, values: BlockArrays) -> list[Value]:
        """Return the sum of all parts, or their values in order, from those of all blocks."""
        known = {
            block: self._known[block] if given is None else self.parts.from_host(given)
            for block, given in values.items()
        }
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
                # The others have a half that was sent, and expect it of this island.
                for half in set(halves) - self._sent:
                    self._known.pop(half, None)
        return self._known[block]


def check_same(view: View, frames: Frames) -> None:
    """Raise `AgreementError` if members are at other exchanges, or on other rows."""
    each = {index: frame.same for index, _ in view.members for frame, _ in frames[index]}
    if why := disagreement(each):
        raise AgreementError(why)
