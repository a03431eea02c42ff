"""Batches of an epoch, one of which can be read ahead."""

import itertools
from collections.abc import Iterator
from typing import Any

from replicax.core.data.feed import GaveUpError


class Ahead(Iterator[Any]):
    """Yields from `batches`; knows whether there are more."""

    def __init__(self, batches: Iterator[Any]) -> None:
        self._batches = batches
        self._next: list[Any] = []
        self.gave_up = False
        """Whether the next batch did not come before the run had to stop."""

    def __next__(self) -> Any:
        if self._next:
            return self._next.pop()
        try:
            return next(self._batches)
        except GaveUpError:
            self.gave_up = True
            raise StopIteration from None

    @property
    def ended(self) -> bool:
        """Whether there are no more batches; may wait for the next one."""
        if not self._next:
            self._next.extend(itertools.islice(self, 1))
        return not self._next and not self.gave_up
