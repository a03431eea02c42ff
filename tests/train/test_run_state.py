"""The place that a checkpoint keeps: the next batch, for each kind of source."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import replicax as rx
from replicax.core.data.sources import Source, as_source
from replicax.core.ground.job import Alone
from replicax.train.dispatched import RunPosition
from replicax.train.run.run_state import RunState, first_batch

ROWS = (100, 20)


class Two(Alone):
    """A job whose other process has 20 rows."""

    processes = 2

    def gather(self, topic: str, value: Any, **options: Any) -> list[Any]:
        return [value, [ROWS[1], *value[1:]]]


def source(batch_size: int, *, per_process: bool) -> Source:
    data: Any = {"x": np.zeros(ROWS[0] if per_process else sum(ROWS), np.float32)}
    job = Two() if per_process else Alone()
    data = rx.ProcessLocal(data) if per_process else data
    return as_source(data, batch_size, job, shuffle=False, seed=0)


@pytest.mark.promise("outside.odd-sources-resume")
@pytest.mark.parametrize("per_process", [False, True])
@pytest.mark.parametrize("batch_size", [20, 40])
@pytest.mark.parametrize("by_rows", [False, True])
def test_the_next_batch_is_the_one_after_the_last(
    per_process: bool, batch_size: int, by_rows: bool
) -> None:
    """One of two unequal processes has no more rows while the other goes on."""
    read = source(20, per_process=per_process)
    assert read.batches is not None
    parts: Any = SimpleNamespace(save_state=lambda *_: {}, rows=0, in_a_row=0)
    for batch in range(0, read.batches + 1, batch_size // 20):
        state = RunState(parts, read, Alone(), parts, parts, parts, None, parts)
        state.place = RunPosition(batch, 0, batch)
        position, extra = state.position(), state.extra()
        if by_rows:
            extra["batch_size"] = None
        now = source(batch_size, per_process=per_process)
        assert first_batch(now, position, extra) == batch * 20 // batch_size
