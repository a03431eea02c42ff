"""From a target to the network of its devices."""

import pytest

from replicax.analysis.hardware import CHIPS
from replicax.errors import ConfigError
from replicax.plan.host_network import HostNetwork
from replicax.plan.network import network
from replicax.plan.target import parse_target
from replicax.plan.torus import SliceNetwork, TorusNetwork


def test_gpus_in_a_host_need_no_network_card() -> None:
    joined = network(parse_target("h100:8"))
    assert joined == HostNetwork(CHIPS["h100"].inside, None, 8)


def test_gpus_in_hosts() -> None:
    joined = network(parse_target("h100:64"), ("ring",))
    assert joined == HostNetwork(CHIPS["h100"].inside, CHIPS["h100"].between, 8, 8, ("ring",))


def test_one_gpu_in_each_host() -> None:
    joined = network(parse_target("a100-80:4x1"))
    assert joined == HostNetwork(None, CHIPS["a100-80"].between, 1, 4)


@pytest.mark.parametrize("text", ["h100:1", "v5e:1x1", "cpu:1"])
def test_one_device_of_any_kind(text: str) -> None:
    assert network(parse_target(text)).time("all-reduce", 1e9).seconds == 0


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
    assert inside is not None
    assert joined.link_bytes_per_second == inside.bytes_per_second / 4


def test_tpus_beyond_a_slice() -> None:
    joined = network(parse_target("v5e:16x16").with_devices(1024))
    assert isinstance(joined, SliceNetwork)
    assert (joined.devices, joined.between.devices) == (1024, 4)


def test_devices_of_unknown_speed() -> None:
    with pytest.raises(ConfigError, match=r"cpu:8.*not known.*bench"):
        network(parse_target("cpu:8"))
