"""Nothing of these tests is left behind: no job, no open socket."""

import gc
from collections.abc import Iterator

import pytest

from replicax.cluster.cluster_job import set_job


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    set_job(None)
    gc.freeze()  # what earlier tests left takes seconds to go through
    yield
    set_job(None)
    gc.collect()  # an unclosed socket warns, hence fails, where it was left and not in a later test
    gc.unfreeze()
