"""The exchange of islands: bytes computed by hand, and those that pass through the sockets."""

import itertools
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from plan.small_step import MODEL, PARAMETERS, loss, rows, step, strict
from support.cases import CASES
from support.island_networks import connected, places
from support.waiting import until

import replicax as rx
from replicax.cluster.watchdog import Timeouts
from replicax.core.ground.job import Alone
from replicax.errors import ConfigError
from replicax.islands.group import Group
from replicax.islands.peer import IslandPeer
from replicax.plan.island_exchange import exchange_bytes, island_exchange
from replicax.plan.site_network import parse_network

HEADER_BYTES = 2000
"""The most that the header of a frame of these models takes."""


def test_seconds_computed_by_hand() -> None:
    link = parse_network("1 Gbit/s, 20 ms")
    found = island_exchange(3, 8, 125_000_000, link, batch_seconds=8.0)
    assert found.sent_bytes == (250_000_000, 500_000_000, 500_000_000)
    assert found.received_bytes == (500_000_000, 375_000_000, 375_000_000)
    assert found.most_parts == 3
    assert found.seconds == pytest.approx(500 / 125 + 2 * 0.02)
    assert found.share == pytest.approx(4.04 / (4.04 + 3.0))
    alone = island_exchange(1, 8, 1000, link, 8.0)
    assert (alone.seconds, alone.share) == (0.0, 0.0)
    assert exchange_bytes(4, 5, 10) == [(0, 40), *[(40, 30)] * 4]  # one has nothing to compute
    unknown = island_exchange(2, 8, 1000)
    assert (unknown.seconds, unknown.share) == (None, None)


def test_parts_are_a_power_of_two() -> None:
    with pytest.raises(ConfigError, match=r"micro_shards=6.*use 8"):
        island_exchange(2, 6, 10)


def test_a_plan_has_the_exchange() -> None:
    given: dict[str, Any] = {"target": "h100:8", "by_formula": True, "changes": {}}
    found = rx.plan(step(), MODEL, rows(64), **given, islands=2, network="1 Gbit/s, 20 ms")
    sums = 4 * PARAMETERS + 12
    exchange, speed = found.islands, found.speed
    assert (exchange.sums_bytes, exchange.sent_bytes) == (sums, (sums, sums))
    assert exchange.seconds == pytest.approx(sums / 1.25e8 + 0.04)
    assert exchange.share == pytest.approx(
        exchange.seconds / (exchange.seconds + speed.step.seconds / 2)
    )
    assert strict(found)["islands"]["network"]["text"] == "1 Gbit/s, 20 ms"
    (line,) = [line for line in str(found).splitlines() if line.startswith("sums ")]
    assert "2 islands, 8 parts" in line
    assert rx.plan(step(), MODEL, rows(64), **given).islands is None


class Member(Alone):
    """An island of this process, whose parts a group exchanges."""

    def __init__(self, group: Group) -> None:
        super().__init__()
        self.peers: Any = SimpleNamespace(
            count=len(group.place.addresses),
            exchange=lambda parts: group.exchange(parts)[0],
            compare=lambda *_: None,
        )


@pytest.mark.promise("plan.bytes-of-islands")
@pytest.mark.parametrize("islands", [2, 3])
@pytest.mark.parametrize("case", ["small", "linen"])
def test_the_bytes_are_those_at_the_sockets(islands: int, case: str) -> None:
    """Headers come on top, once for each frame."""
    if case == "small":
        chance = np.random.default_rng(0)
        model: Any = jax.tree.map(
            lambda leaf: jnp.asarray(chance.normal(size=leaf.shape), leaf.dtype), MODEL
        )
        batch: Any = {"x": chance.normal(size=(24, 32)).astype(np.float32)}
        function: Any = loss
    else:
        model, function = CASES[case].model(), CASES[case].loss
        batch = jax.tree.map(lambda leaf: np.asarray(leaf)[:24], CASES[case].source)
    groups = [Group(place, Timeouts()) for place in places(islands)]
    connected(islands, [group.network for group in groups])

    def train(group: Group) -> list[IslandPeer]:
        mesh = rx.make_mesh(1, devices=jax.devices()[:1])
        settings: dict[str, Any] = {"mesh": mesh, "job": Member(group)}
        dp = rx.DataParallel(function, optax.adam(1e-3), **settings)
        group.enter({}, has_state=True)
        peers = list(group.network.peers.values())
        assert len(peers) == islands - 1
        dp.step(dp.init(model), batch)
        return peers

    try:
        with ThreadPoolExecutor(islands) as threads:
            peers_of = list(threads.map(train, groups))

        def total(peers: list[IslandPeer]) -> tuple[int, int]:
            return sum(each.sent_bytes for each in peers), sum(e.received_bytes for e in peers)

        until(lambda: len(set(total([*itertools.chain(*peers_of)]))) == 1)
        counted = [total(peers) for peers in peers_of]
    finally:
        for group in groups:
            group.network.close()
    given: dict[str, Any] = {"target": "h100:1", "by_formula": True, "changes": {}}
    dp = rx.DataParallel(function, optax.adam(1e-3), mesh=rx.make_mesh(1, devices=jax.devices()))
    planned = rx.plan(dp, model, batch, **given, islands=islands).islands
    for number, (sent, received) in enumerate(counted):
        frames = islands - 1
        assert 0 < sent - planned.sent_bytes[number] < frames * HEADER_BYTES
        assert 0 < received - planned.received_bytes[number] < frames * HEADER_BYTES
