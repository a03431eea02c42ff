"""Grain datasets: whether their elements are rows, as `dp.feed` takes them to be."""

import sys
from collections.abc import Iterator
from typing import Any

from replicax.errors import ConfigError


def is_grain(data: Any, *kinds: str) -> bool:
    """Whether `data` is a Grain dataset of one of these kinds."""
    grain = sys.modules.get("grain")  # a Grain dataset implies that grain is imported
    return grain is not None and isinstance(data, tuple(getattr(grain, kind) for kind in kinds))


def batch_size_in(data: Any) -> int | None:
    """Return the size of the batches that the elements of a Grain dataset are, if they are any."""
    for step in _steps(data):
        name = type(step).__name__
        if name.startswith("FlatMap"):
            return None
        if name.startswith("Batch"):
            return getattr(step, "_batch_size", None)
    return None


def check_rows(data: Any, size: int) -> None:
    """Raise `ConfigError` if a Grain dataset, to be put into batches of `size`, has no rows.

    A batch of another size may be a row, such as a window of tokens.
    """
    if batch_size_in(data) == size or (not size and batch_size_in(data)):
        raise ConfigError(
            f"the elements of the Grain dataset are batches of {batch_size_in(data)} rows, which "
            "would be put into batches again: leave .batch out and pass batch_size=..., or pass "
            "an IterDataset of batches without batch_size"
        )
    if is_grain(data, "MapDataset"):
        names = [type(step).__name__ for step in _steps(data)]
        if any(name.startswith("Filter") for name in names):
            raise ConfigError(
                "a Grain MapDataset with .filter, whose number of rows is not known: pass "
                "dataset.to_iter_dataset()"
            )


def _steps(data: Any) -> Iterator[Any]:
    """Yield a dataset, and what it was made of, from the last step to the first."""
    while data is not None:
        yield data
        data = next(iter(getattr(data, "_parents", ())), None)
