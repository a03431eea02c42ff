"""Collectives on a torus, against times worked out by hand and by routing every message."""

from fractions import Fraction
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replicax.analysis.compiled import COLLECTIVES
from replicax.analysis.hardware import Interconnect
from replicax.plan.network import LINE_RATE_SHARE, HostNetwork, SliceNetwork, TorusNetwork

RING = TorusNetwork((4,), (True,), 10.0, 0.5)
SQUARE = TorusNetwork((4, 4), (False, False), 10.0, 0.5)
BETWEEN = HostNetwork(None, Interconnect(4 / LINE_RATE_SHARE, 3.0, "made up"), 1, 2, ("ring",))


def test_a_ring_sends_both_ways() -> None:
    # A gather of 80 bytes: 60 arrive over two links of 10, in 3 steps.
    assert RING.time("all-gather", 80) == pytest.approx(60 / 20 + 3 * 0.5)
    assert RING.time("reduce-scatter", 20) == pytest.approx(60 / 20 + 3 * 0.5)
    assert RING.time("all-reduce", 80) == pytest.approx(2 * (60 / 20 + 3 * 0.5))
    assert RING.time("collective-broadcast", 80) == pytest.approx(80 / 20 + 3 * 0.5)
    assert RING.time("collective-permute", 80) == pytest.approx(80 / 10 + 0.5)


def test_a_corner_of_a_grid_has_one_link_in_each_dimension() -> None:
    assert SQUARE.time("all-gather", 160) == pytest.approx(150 / 20 + 6 * 0.5)
    closed = TorusNetwork((4, 4), (True, True), 10.0, 0.5)
    assert closed.time("all-gather", 160) == pytest.approx(150 / 40 + 6 * 0.5)
    flat = TorusNetwork((4, 1), (True, False), 10.0, 0.5)
    assert flat.time("all-gather", 80) == RING.time("all-gather", 80)


@pytest.mark.parametrize("kind", COLLECTIVES)
def test_one_device_sends_nothing(kind: str) -> None:
    assert TorusNetwork((1, 1), (False, False), 10.0, 0.5).time(kind, 80) == 0


@pytest.mark.parametrize(
    ("shape", "rings"),
    [
        ((4,), (True,)),
        ((8,), (True,)),
        ((4,), (False,)),
        ((8,), (False,)),
        ((2, 4), (False, True)),
        ((4, 4), (True, False)),
        ((2, 2, 4), (False, False, True)),
    ],
)
def test_all_to_all_by_routing_every_message(
    shape: tuple[int, ...], rings: tuple[bool, ...]
) -> None:
    """The busiest link, where messages take the shorter way along one dimension after another."""
    loads: dict[tuple[tuple[int, ...], int, int], Fraction] = {}
    places = list(product(*map(range, shape)))
    for start, goal in product(places, places):
        for place, dim, way, share in _hops(start, goal, shape, rings):
            loads[place, dim, way] = loads.get((place, dim, way), Fraction(0)) + share
    size = 1000.0
    busiest = float(max(loads.values())) * size / len(places)
    torus = TorusNetwork(shape, rings, 10.0, 0)
    assert torus.time("all-to-all", size) == pytest.approx(busiest / 10)


def _hops(
    start: tuple[int, ...], goal: tuple[int, ...], shape: tuple[int, ...], rings: tuple[bool, ...]
) -> list[tuple[tuple[int, ...], int, int, Fraction]]:
    """Links that a message takes, with the share of it on each: half each way around if equal."""
    hops = []
    at = list(start)
    for dim, length in enumerate(shape):
        away = goal[dim] - at[dim]
        ways = [(1 if away > 0 else -1, abs(away), Fraction(1))] if away else []
        if rings[dim] and away:
            up = away % length
            down = length - up
            if up == down:
                ways = [(1, up, Fraction(1, 2)), (-1, down, Fraction(1, 2))]
            else:
                ways = [(1, up, Fraction(1)) if up < down else (-1, down, Fraction(1))]
        for way, steps, share in ways:
            place = at.copy()
            for _ in range(steps):
                hops.append((tuple(place), dim, way, share))
                place[dim] = (place[dim] + way) % length
        at[dim] = goal[dim]
    return hops


def test_slices_reduce_inside_then_between() -> None:
    joined = SliceNetwork(RING, BETWEEN)
    assert joined.devices == 8
    # 80 bytes: scattered to 20 each, which 2 slices reduce at 4 bytes a second, then gathered.
    near = 2 * (60 / 20 + 3 * 0.5)
    assert joined.time("all-reduce", 80) == pytest.approx(near + 2 * (10 / 4 + 3.0))
    # 160 bytes: a device's part is 20, the slices' two parts of it 40, half of which must come.
    gathered = (20 / 4 + 3.0) + (120 / 20 + 3 * 0.5)
    assert joined.time("all-gather", 160) == pytest.approx(gathered)
    assert joined.time("reduce-scatter", 20) == pytest.approx(gathered)


@given(
    kind=st.sampled_from(COLLECTIVES),
    size=st.floats(1, 1e12),
    more=st.floats(1, 1e12),
    slices=st.integers(1, 64),
)
def test_more_bytes_take_longer(kind: str, size: float, more: float, slices: int) -> None:
    link = Interconnect(4.0, 3.0, "made up")
    joined = SliceNetwork(SQUARE, HostNetwork(None, link, 1, slices))
    assert joined.time(kind, size) <= joined.time(kind, size + more)
