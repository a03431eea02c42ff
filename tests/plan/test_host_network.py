"""Collectives inside a host and between hosts, against times worked out by hand and by a ring."""

import math

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
def test_one_device_sends_nothing(kind: str) -> None:
    alone = HostNetwork(None, None, 1).time(kind, 1e9)
    assert alone == 0


@pytest.mark.parametrize("kind", COLLECTIVES)
def test_nothing_takes_no_time(kind: str) -> None:
    assert TWO_HOSTS.time(kind, 0) == 0


def test_a_ring_in_a_host() -> None:
    # 2 x 3 steps of 100 bytes at 100 bytes a second, and 0.5 s each.
    reduced = HOST.time("all-reduce", 400)
    assert reduced == pytest.approx(2 * 3 * (1 + 0.5))
    # Half of it: gathers count whole, scatters by their part.
    assert HOST.time("all-gather", 400) == pytest.approx(3 * (1 + 0.5))
    assert HOST.time("reduce-scatter", 100) == pytest.approx(3 * (1 + 0.5))


def test_a_ring_over_two_hosts() -> None:
    # 4 cards of 24 are slower than the 100 inside. Of 7 steps one crosses to the other host.
    only_rings = HostNetwork(INSIDE, BETWEEN, 4, 2, ("ring",))
    gathered = 7 / 8 * 960 / 96 + 6 * 0.5 + 1 * 2.0
    assert only_rings.time("all-gather", 960) == pytest.approx(gathered)
    assert only_rings.time("all-reduce", 960) == pytest.approx(2 * gathered)


def test_a_tree_where_it_is_faster() -> None:
    # Each byte up and down, 3 steps along the host and 1 between: 20 + 7 against the ring's 27.5.
    reduced = TWO_HOSTS.time("all-reduce", 960)
    assert reduced == pytest.approx(2 * 960 / 96 + 2 * (3 * 0.5 + 1 * 2.0))
    # Twice as much, and the ring that sends 7/8 of it wins: 35 + 10 against 40 + 7.
    assert TWO_HOSTS.time("all-reduce", 1920) == pytest.approx(35 + 10)


@pytest.mark.parametrize(("hosts", "depth"), [(2, 1), (3, 2), (4, 2), (64, 6), (65, 7)])
def test_a_tree_is_as_deep_as_its_logarithm(hosts: int, depth: int) -> None:
    trees = HostNetwork(None, BETWEEN, 1, hosts, ("tree",))
    latency = trees.time("all-reduce", 1e-9)
    assert latency == pytest.approx(2 * depth * 2.0, abs=1e-6)


def test_all_to_all_uses_both_links_at_once() -> None:
    # 8 parts of 100 bytes: 3 to the own host, 4 by the card at 24 bytes a second.
    assert TWO_HOSTS.time("all-to-all", 800) == pytest.approx(4 * 100 / 24 + 4 * 2.0)
    assert HOST.time("all-to-all", 400) == pytest.approx(3 * 100 / 100 + 3 * 0.5)


def test_a_permutation_is_one_message() -> None:
    assert HOST.time("collective-permute", 400) == pytest.approx(4 + 0.5)
    assert TWO_HOSTS.time("collective-permute", 48) == pytest.approx(2 + 2.0)


def test_a_broadcast_passes_once_around() -> None:
    assert HOST.time("collective-broadcast", 400) == pytest.approx(4 + 3 * 0.5)


@given(devices=st.integers(2, 12), chunk=st.integers(1, 50))
def test_a_ring_that_is_run(devices: int, chunk: int) -> None:
    """Sum vectors around a ring, counting the steps and what each device sends in them."""
    held = [[device + 1] * devices for device in range(devices)]
    steps = sent = 0
    for phase in ("reduce", "gather"):
        for step in range(devices - 1):
            shift = 0 if phase == "reduce" else 1
            messages = []
            for device in range(devices):
                part = (device + shift - step) % devices
                messages.append(((device + 1) % devices, part, held[device][part]))
            for receiver, part, value in messages:
                held[receiver][part] = held[receiver][part] + value if phase == "reduce" else value
            steps, sent = steps + 1, sent + chunk
    assert all(row == [devices * (devices + 1) // 2] * devices for row in held)
    joined = HostNetwork(INSIDE, None, devices, 1, ("ring",))
    expected = sent / 100.0 + steps * 0.5
    assert joined.time("all-reduce", devices * chunk) == pytest.approx(expected)


@given(size=SIZES, hosts=st.integers(1, 64), each=st.integers(1, 8))
def test_an_all_reduce_is_no_slower_than_scatter_and_gather(
    size: float, hosts: int, each: int
) -> None:
    joined = HostNetwork(INSIDE, BETWEEN, each, hosts)
    parts = joined.time("reduce-scatter", size / joined.devices)
    parts += joined.time("all-gather", size)
    assert joined.time("all-reduce", size) <= parts * (1 + 1e-9)


@given(size=SIZES, more=SIZES, kind=st.sampled_from(COLLECTIVES), hosts=st.integers(2, 64))
def test_more_bytes_take_longer(size: float, more: float, kind: str, hosts: int) -> None:
    joined = HostNetwork(INSIDE, BETWEEN, 4, hosts)
    assert joined.time(kind, size) <= joined.time(kind, size + more)


@given(size=SIZES, kind=st.sampled_from(COLLECTIVES), hosts=st.integers(1, 64))
def test_more_hosts_are_no_faster(size: float, kind: str, hosts: int) -> None:
    times = [HostNetwork(INSIDE, BETWEEN, 4, n).time(kind, size) for n in (hosts, hosts + 1)]
    assert times[0] <= times[1] * (1 + 1e-9)


@given(size=SIZES, hosts=st.integers(2, 64))
def test_without_latency_only_bytes_count(size: float, hosts: int) -> None:
    joined = HostNetwork(
        Interconnect(100.0, 0, "made up"),
        Interconnect(24 / LINE_RATE_SHARE, 0, "made up"),
        4,
        hosts,
    )
    n = 4 * hosts
    expected = 2 * (n - 1) / n * size / 96
    assert joined.time("all-reduce", size) == pytest.approx(expected)


def test_without_bytes_to_wait_for_only_steps_count() -> None:
    fast = HostNetwork(Interconnect(math.inf, 0.5, "made up"), None, 8, 1, ("ring",))
    assert fast.time("all-reduce", 1e12) == pytest.approx(2 * 7 * 0.5)
