"""These tests leave no thread and no open socket behind."""

import gc
import threading
from collections.abc import Iterator

import pytest
from support.island_networks import Island, RawIsland, islands, places


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    gc.freeze()  # garbage of earlier tests takes seconds to collect
    yield
    gc.collect()  # an unclosed socket warns, and so fails, in the test that left it
    gc.unfreeze()
    left = [t.name for t in threading.enumerate() if t.name.startswith("replicax-island")]
    assert left == []


@pytest.fixture
def raw() -> Iterator[tuple[Island, RawIsland]]:
    """The first of two islands, and a raw one as the other."""
    first, second = places(2)
    other = RawIsland(second)
    with islands([first]) as (island,):
        yield island, other
        other.close()
