"""Data held by each process, and its total size."""

from typing import Any

import numpy as np
import pytest

import replicax as rx
from replicax.core.data.sources import as_source
from replicax.core.ground.job import Alone
from replicax.errors import ConfigError


class Pair(Alone):
    """A job of two processes, the other of which has `other` rows."""

    processes = 2

    def __init__(self, other: int | None) -> None:
        super().__init__()
        self._other = other

    def gather(self, topic: str, value: Any, **options: Any) -> list[Any]:
        return [value, [self._other, "digest", None]]


def opened(own: Any, other: int | None) -> Any:
    """Data of this process beside a process with `other` rows, at a batch size of 16 for both."""
    return as_source(rx.ProcessLocal(own), 16, Pair(other), shuffle=False, seed=0)


@pytest.mark.parametrize(
    ("other", "rows", "batches", "last"), [(20, 39, 3, 7), (4, 23, 3, 3), (40, 59, 5, 8)]
)
def test_an_epoch_lasts_as_long_as_one_process_has_rows(
    other: int, rows: int, batches: int, last: int
) -> None:
    source = opened(np.arange(19), other)
    assert (source.rows, source.batches, source.last_rows) == (rows, batches, last)
    assert [len(index) for _, index, _ in source.epoch(0)] == [8, 8, 3]


def test_the_length_is_not_known_where_one_process_does_not_know_it() -> None:
    source = opened(np.arange(19), None)
    assert (source.rows, source.batches, source.last_rows) == (None, None, None)


def test_processes_divide_the_batch_size() -> None:
    with pytest.raises(ConfigError, match=r"batch_size=15 .* 2 processes .* multiple of 2"):
        as_source(rx.ProcessLocal(np.arange(9)), 15, Pair(9), shuffle=False, seed=0)
