"""Which islands begin."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from support.island_networks import places

from replicax.errors import AgreementError
from replicax.islands.founding import FOUND_SECONDS, AwaitedIslands, disagreement, founders, refuse
from replicax.islands.messages import Out, Ready


@pytest.mark.parametrize(
    ("there", "waited", "is_over", "begins"),
    [
        (3, 0.0, False, True),
        (2, FOUND_SECONDS - 1, False, False),
        (2, FOUND_SECONDS + 1, False, True),
        (1, FOUND_SECONDS + 1, False, False),
        (1, FOUND_SECONDS + 1, True, True),
        (1, FOUND_SECONDS - 1, True, False),  # all may have been started again
    ],
)
def test_enough_of_three_islands_begin(
    there: int, waited: float, is_over: bool, begins: bool
) -> None:
    starts = [(index, f"start {index}") for index in range(there)]
    asks = {index: (start, Ready("{}", list(range(there)))) for index, start in starts[1:]}
    found = founders(starts[0], 3, asks, asks, waited, lambda: is_over)
    assert sorted(found) == (starts if begins else [])


def test_islands_that_are_not_ready_are_named_with_the_reason() -> None:
    place, *others = places(4)
    addresses = [each.addresses[each.index] for each in others]
    network: Any = SimpleNamespace(peers=[1, 2], troubles={3: "refused"})
    found = AwaitedIslands(place, network).awaited([2])
    assert [address in line for address, line in zip(addresses[::2], found, strict=True)] == [1, 1]
    assert found[1].endswith("refused")


def test_what_differs_is_told_with_the_islands() -> None:
    found = disagreement({4: '{"a": 1, "b": {"c": 2}}', 7: '{"b": {"c": 3}, "a": 1}'})
    assert found is not None
    assert "b.c is 3 on island 7, 2 on island 4" in found
    assert disagreement({4: '{"a": 1, "b": 2}', 7: '{"b": 2, "a": 1}'}) is None


def test_who_refuses_goes_once_nobody_can_wait_for_it() -> None:
    """A connection that is replaced may be gone before what was said on it is heard."""
    told = []

    class Connection:
        def __init__(self, index: int, number: int) -> None:
            self.index, self.number = index, number

        def send(self, _: Out) -> None:
            told.append((self.index, self.number))

    network: Any = SimpleNamespace(peers={1: Connection(1, 0)}, troubles={2: "not there yet"})
    refused_by: set[int] = set()

    def moments() -> Iterator[None]:
        network.peers = {}  # replaced
        yield
        network.peers, network.troubles = {1: Connection(1, 1), 2: Connection(2, 0)}, {}
        yield
        network.peers, network.troubles = {1: network.peers[1]}, {2: "it is gone"}
        yield
        refused_by.add(1)
        yield

    passing = moments()
    changed: Any = SimpleNamespace(wait=lambda _: next(passing))
    with pytest.raises(AgreementError, match="why"):
        refuse(network, {1, 2}, "why", changed, refused_by)
    assert sorted(told) == [(1, 0), (1, 1), (2, 0)]
    assert next(passing, "over") == "over"
