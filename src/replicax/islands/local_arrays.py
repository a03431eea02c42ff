"""Arrays that an island has for itself, such as what it learned: each sends its own to all."""

from collections.abc import Collection
from typing import Any

import numpy as np

from replicax.core.ground.job import Parts
from replicax.islands.local_parts import Frames, LocalParts
from replicax.islands.messages import View
from replicax.islands.parts import Block

NOTHING: Parts[Any] = Parts(0, lambda _: None, None, lambda _: [], lambda _: None)
"""No parts: an exchange of notes or of arrays."""


class LocalArrays(LocalParts[list[np.ndarray]]):
    """The arrays of this island, in place of parts that any island could compute.

    What a lost island has not sent to all others is lost.
    """

    def __init__(self, arrays: list[np.ndarray]) -> None:
        super().__init__(NOTHING, lambda _: None)
        self._arrays, self._is_sent = arrays, False

    def missing(self, chosen: Collection[int]) -> tuple[list[Block], list[np.ndarray]]:
        return [], [] if self._is_sent else self._arrays

    def sent(self, blocks: Collection[Block]) -> None:
        self._is_sent = True

    def combined(
        self, view: View, exchange: int, frames: Frames
    ) -> tuple[list[list[np.ndarray]], list[Any]]:
        """Return the arrays of each member of `view`, in order."""
        lists = []
        for index, _ in view.members:
            given: list[np.ndarray] = []
            for _, arrays in frames[index]:
                given += arrays
            lists.append(given or self._arrays)  # this island's own are not among the frames
        return lists, []
