"""These tests leave no job and no open socket behind."""

import gc
from collections.abc import Iterator

import pytest

from replicax.cluster.cluster_job import set_job


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    set_job(None)
    gc.freeze()  # garbage of earlier tests takes seconds to collect
    yield
    set_job(None)
    gc.collect()  # an unclosed socket warns, and so fails, in the test that left it
    gc.unfreeze()
