"""Nothing of these tests is left behind: no pulse, no link, no open socket."""

import gc
from collections.abc import Iterator

import pytest

from replicax.cluster import link
from replicax.cluster.pulse import PULSE


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    PULSE.reset()
    PULSE.rest()
    yield
    link.set_link(None)
    PULSE.reset()
    gc.collect()  # an unclosed socket warns, hence fails, where it was left and not in a later test
