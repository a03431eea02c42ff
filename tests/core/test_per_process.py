"""Data of each process's own: how much of it there is in all."""

from typing import Any

import numpy as np
import pytest

import replicax as rx
from replicax.core import per_process
from replicax.core.sources import as_source
from replicax.errors import ConfigError


class Link:
    """To a process that has other rows."""

    def __init__(self, other: int | None) -> None:
        self._other = other

    def unique(self, topic: str) -> str:
        return topic

    def gather(self, _topic: str, value: Any) -> list[Any]:
        return [value, self._other]


def opened(monkeypatch: pytest.MonkeyPatch, own: Any, other: int | None) -> Any:
    """`own` data beside a process with `other` rows, at a batch size of 16 for both."""
    monkeypatch.setattr(per_process, "current_link", lambda: Link(other))
    monkeypatch.setattr(per_process.jax, "process_count", lambda: 2)
    return as_source(rx.PerProcess(own), 16, shuffle=False, seed=0)


@pytest.mark.parametrize(
    ("other", "rows", "batches", "last"), [(20, 39, 3, 7), (4, 23, 3, 3), (40, 59, 5, 8)]
)
def test_an_epoch_lasts_as_long_as_one_process_has_rows(
    other: int, rows: int, batches: int, last: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = opened(monkeypatch, np.arange(19), other)
    assert (source.rows, source.batches, source.last_rows) == (rows, batches, last)
    assert [len(index) for _, index in source.epoch(0)] == [8, 8, 3]


def test_the_length_is_not_known_where_one_process_does_not_know_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source = opened(monkeypatch, np.arange(19), None)
    assert (source.rows, source.batches, source.last_rows) == (None, None, None)


def test_processes_divide_the_batch_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(per_process.jax, "process_count", lambda: 3)
    with pytest.raises(ConfigError, match=r"batch_size=16 .* 3 processes .* multiple of 3"):
        as_source(rx.PerProcess(np.arange(9)), 16, shuffle=False, seed=0)


def test_alone_it_is_the_data_itself() -> None:
    source = as_source(rx.PerProcess(np.arange(19)), 8, shuffle=False, seed=0)
    assert (source.rows, source.batches, source.last_rows) == (19, 3, 3)
