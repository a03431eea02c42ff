"""From a target to the network of its devices."""

import math

import pytest

from replicax.analysis.hardware import CHIPS
from replicax.core.placement.mesh import abstract_mesh
from replicax.errors import ConfigError
from replicax.plan.network import (
    HostNetwork,
    SliceNetwork,
    TorusNetwork,
    coordinates,
    network,
    networks,
)
from replicax.plan.target import parse_target


@pytest.mark.parametrize(
    ("text", "rings"),
    [("v5e:4x4", (False, False)), ("v5e:8x16", (False, True)), ("v5e:16x16", (True, True))],
)
def test_a_tpu_slice_closes_where_it_spans_the_pod(text: str, rings: tuple[bool, ...]) -> None:
    joined = network(parse_target(text))
    assert isinstance(joined, TorusNetwork)
    assert joined.rings == rings
    # 4 links of a chip share what it sends to all neighbours.
    inside = CHIPS["v5e"].inside
    assert joined.link_bytes_per_second == inside.bytes_per_second / 4


def test_devices_of_unknown_speed() -> None:
    assert network(parse_target("cpu:1")).time("all-reduce", 1e9) == 0
    with pytest.raises(ConfigError, match=r"cpu:8.*not known.*bench"):
        network(parse_target("cpu:8"))


def test_a_group_inside_a_host_needs_no_network_card() -> None:
    # Two hosts of eight: `model` takes four neighbours, `data` one of every four.
    over = networks(parse_target("h100:16"), abstract_mesh(4, model=4))
    inside, between = CHIPS["h100"].inside, CHIPS["h100"].between
    assert over(("model",)) == HostNetwork(inside, None, 4)
    assert over(("data",)) == HostNetwork(inside, between, 2, 2)
    assert over(None) == HostNetwork(inside, between, 8, 2)
    assert over(()).time("all-reduce", 1e9) == 0


def test_hybrid_sharding_gathers_in_a_host_and_reduces_between_hosts() -> None:
    over = networks(parse_target("h100:32"), abstract_mesh(4, fsdp=8))
    assert over(("fsdp",)) == HostNetwork(CHIPS["h100"].inside, None, 8)
    assert over(("data",)) == HostNetwork(None, CHIPS["h100"].between, 1, 4)
    # Eight devices of a host send to other hosts at once: each has an eighth of its cards.
    alone = over(("data",)).time("all-reduce", 1e9)
    assert alone > over(None).time("all-reduce", 1e9)


@pytest.mark.parametrize(
    ("topology", "first"),
    [
        ((4, 4), [(0, 0), (1, 0), (0, 1), (1, 1), (2, 0), (3, 0), (2, 1), (3, 1), (0, 2)]),
        ((2, 4), [(0, 0), (1, 0), (0, 1), (1, 1), (0, 2), (1, 2), (0, 3), (1, 3)]),
        ((2, 2, 4), [(0, 0, 0), (1, 0, 0), (0, 1, 0), (1, 1, 0), (0, 0, 1)]),
        ((1, 1), [(0, 0)]),
    ],
)
def test_where_the_devices_of_a_slice_are(
    topology: tuple[int, ...], first: list[tuple[int, ...]]
) -> None:
    """As libtpu 0.0.42 describes these slices."""
    found = coordinates(topology)
    assert [tuple(each) for each in found[: len(first)].tolist()] == first
    assert len(found) == math.prod(topology)
    assert len({tuple(each) for each in found.tolist()}) == len(found)


def test_a_group_has_a_part_of_the_torus() -> None:
    target = parse_target("v5e:4x4")
    over = networks(target, abstract_mesh(4, model=4))
    whole = network(target)
    assert isinstance(whole, TorusNetwork)
    rate, hop = whole.link_bytes_per_second, whole.latency_seconds
    assert over(("model",)) == TorusNetwork((2, 2), (False, False), rate, hop)
    # The four replicas' devices are two apart, and share the links between them.
    assert over(("data",)) == TorusNetwork((2, 2), (False, False), rate / 2, 2 * hop)


def test_a_ring_closes_for_a_group_that_goes_round() -> None:
    target = parse_target("v5e:16x16")
    along = [place for place, (_, y) in enumerate(coordinates((16, 16)).tolist()) if y == 0]
    joined = network(target, members=along)
    assert isinstance(joined, TorusNetwork)
    assert (joined.shape, joined.rings) == ((16, 1), (True, False))


def test_a_group_of_each_slice() -> None:
    target = parse_target("v5e:16x16").with_devices(512)
    over = networks(target, abstract_mesh(256, model=2))
    near, far = over(("model",)), over(("data",))
    assert isinstance(near, TorusNetwork)
    assert isinstance(far, SliceNetwork)
    assert (far.inside.devices, far.between.devices) == (128, 2)
