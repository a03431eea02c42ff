"""Results of a program that runs once for each part of a batch, kept by part."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax


class PartResults:
    """The results of `compute`, for each of `count` parts; those in `kept` are kept."""

    def __init__(
        self, compute: Callable[[int], list[jax.Array]], count: int, kept: Sequence[int]
    ) -> None:
        self._compute, self._count, self._kept = compute, count, kept
        self._rows: dict[int, list[jax.Array]] = {}

    def __call__(self, part: int) -> list[jax.Array]:
        """Return all results of a part, which is computed now."""
        found = self._compute(part)
        self._rows[part] = [found[n] for n in self._kept]
        return found

    def row(self, part: int) -> list[jax.Array]:
        """Return the kept results of a part, which is computed if it was not."""
        if part not in self._rows:
            self(part)
        return self._rows[part]

    def finished(self) -> list[list[jax.Array]]:
        """Return each kept result of all parts."""
        rows = [self.row(part) for part in range(self._count)]
        return [[row[n] for row in rows] for n in range(len(self._kept))]

    def on_demand(self) -> "list[list[jax.Array]]":
        """Return each kept result as a list of parts, each computed when it is read."""
        return [_Column(self, n, self._count) for n in range(len(self._kept))]


class _Column(list[jax.Array]):
    def __init__(self, results: PartResults, place: int, count: int) -> None:
        super().__init__()
        self._results, self._place, self._count = results, place, count

    def __getitem__(self, part: Any) -> Any:
        return self._results.row(part)[self._place]

    def __iter__(self) -> Iterator[jax.Array]:
        return (self[part] for part in range(self._count))

    def __len__(self) -> int:
        return self._count
