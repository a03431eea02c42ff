"""Collectives inside a host and between hosts, against times worked out by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replicax.analysis.compiled import COLLECTIVES
from replicax.analysis.hardware import Interconnect
from replicax.plan.network import LINE_RATE_SHARE, HostNetwork

INSIDE = Interconnect(100.0, 0.5, "made up")
# 24 bytes a second once the headers are off.
BETWEEN = Interconnect(24.0 / LINE_RATE_SHARE, 2.0, "made up")
HOST = HostNetwork(INSIDE, None, 4)
TWO_HOSTS = HostNetwork(INSIDE, BETWEEN, 4, 2)
SIZES = st.floats(1, 1e12)


@pytest.mark.parametrize("kind", COLLECTIVES)
def test_nothing_to_send_takes_no_time(kind: str) -> None:
    assert HostNetwork(None, None, 1).time(kind, 1e9) == TWO_HOSTS.time(kind, 0) == 0


# Around both hosts: 4 cards of 24 are slower than the 100 inside; of 7 steps, one crosses.
RING = HostNetwork(INSIDE, BETWEEN, 4, 2, ("ring",))
RING_SECONDS = 7 / 8 * 960 / 96 + 6 * 0.5 + 1 * 2.0


@pytest.mark.parametrize(
    ("joined", "kind", "size", "seconds"),
    [
        # 2 x 3 steps of 100 bytes at 100 bytes a second, and 0.5 s each.
        (HOST, "all-reduce", 400, 2 * 3 * (1 + 0.5)),
        # Half of it: gathers count whole, scatters by their part.
        (HOST, "all-gather", 400, 3 * (1 + 0.5)),
        (HOST, "reduce-scatter", 100, 3 * (1 + 0.5)),
        (HOST, "collective-permute", 400, 4 + 0.5),
        (HOST, "collective-broadcast", 400, 4 + 3 * 0.5),
        (HOST, "all-to-all", 400, 3 * 100 / 100 + 3 * 0.5),
        (RING, "all-gather", 960, RING_SECONDS),
        (RING, "all-reduce", 960, 2 * RING_SECONDS),
        # A tree: each byte up and down, 3 steps along the host and 1 between.
        (TWO_HOSTS, "all-reduce", 960, 2 * 960 / 96 + 2 * (3 * 0.5 + 1 * 2.0)),
        # Twice as much, and the ring that sends 7/8 of it wins: 35 + 10 against 40 + 7.
        (TWO_HOSTS, "all-reduce", 1920, 35 + 10),
        (TWO_HOSTS, "collective-permute", 48, 2 + 2.0),
        # 8 parts of 100 bytes: 3 to the own host, 4 by the card at 24 bytes a second, at once.
        (TWO_HOSTS, "all-to-all", 800, 4 * 100 / 24 + 4 * 2.0),
    ],
)
def test_times_worked_out_by_hand(
    joined: HostNetwork, kind: str, size: float, seconds: float
) -> None:
    assert joined.time(kind, size) == pytest.approx(seconds)


@pytest.mark.parametrize(("hosts", "depth"), [(2, 1), (3, 2), (4, 2), (64, 6), (65, 7)])
def test_a_tree_is_as_deep_as_its_logarithm(hosts: int, depth: int) -> None:
    trees = HostNetwork(None, BETWEEN, 1, hosts, ("tree",))
    latency = trees.time("all-reduce", 1e-9)
    assert latency == pytest.approx(2 * depth * 2.0, abs=1e-6)


@given(size=SIZES, hosts=st.integers(1, 64), each=st.integers(1, 8))
def test_an_all_reduce_is_no_slower_than_scatter_and_gather(
    size: float, hosts: int, each: int
) -> None:
    joined = HostNetwork(INSIDE, BETWEEN, each, hosts)
    parts = joined.time("reduce-scatter", size / joined.devices)
    parts += joined.time("all-gather", size)
    assert joined.time("all-reduce", size) <= parts * (1 + 1e-9)


@given(size=SIZES, kind=st.sampled_from(COLLECTIVES), hosts=st.integers(1, 64))
def test_more_hosts_are_no_faster(size: float, kind: str, hosts: int) -> None:
    times = [HostNetwork(INSIDE, BETWEEN, 4, n).time(kind, size) for n in (hosts, hosts + 1)]
    assert times[0] <= times[1] * (1 + 1e-9)
