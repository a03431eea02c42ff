"""An island and its group."""

import pytest
from support.island_networks import places

from replicax.cluster.watchdog import Timeouts
from replicax.errors import IslandLeftError
from replicax.islands.group import Group


def test_an_island_that_waits_for_others_can_be_stopped() -> None:
    asked = []
    group = Group(places(2)[0], Timeouts())
    group.stops = lambda: bool(asked.append(None)) or len(asked) > 1
    with pytest.raises(IslandLeftError, match="island 0"):
        group.enter({})
    group.finish()
    assert len(asked) == 2
