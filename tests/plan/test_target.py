"""Targets as users write them, and the errors of wrong ones."""

from math import prod
from types import SimpleNamespace
from typing import Any

import jax
import pytest
from support.figures import refused

from replicax.analysis.hardware import CHIPS, CPU
from replicax.errors import ConfigError
from replicax.plan.target import attached_target, parse_target


@pytest.mark.parametrize(
    ("text", "chip", "devices", "hosts"),
    [
        ("h100:1", "h100", 1, 1),
        ("h100:3", "h100", 3, 1),
        ("h100:8", "h100", 8, 1),
        ("H100:64", "h100", 64, 8),
        ("h100-80:8", "h100", 8, 1),
        ("h100:4x8", "h100", 32, 4),
        ("h100:16x1", "h100", 16, 16),
        (" a100-40:2x3 ", "a100-40", 6, 2),
        ("v100-32:8", "v100", 8, 1),
    ],
)
def test_gpus(text: str, chip: str, devices: int, hosts: int) -> None:
    target = parse_target(text)
    assert (target.chip, target.text) == (CHIPS[chip], text)
    assert (target.devices, target.hosts, target.topology) == (devices, hosts, None)
    assert target.devices_per_host * hosts == devices
    assert target.rings == ()
    assert target.topology_arguments == {
        "platform": "cuda",
        "topology": f"{hosts}x1x{devices // hosts}",
    }


@pytest.mark.parametrize(
    ("text", "hosts", "rings"),
    [
        ("v5e:1x1", 1, (False, False)),
        ("v5e:2x2", 1, (False, False)),
        ("v6e:2x4", 1, (False, False)),
        ("v5e:4x4", 4, (False, False)),
        ("v6e:8x16", 32, (False, True)),
        ("V5E:16x16", 64, (True, True)),
        ("v4:2x2x1", 1, (False, False, False)),
        ("v4:2x2x4", 4, (False, False, False)),  # no cube of 4x4x4, no ring
        ("v4:4x4x4", 16, (True, True, True)),
        ("v5p:12x12x24", 864, (True, True, True)),
    ],
)
def test_slices_of_tpus(text: str, hosts: int, rings: tuple[bool, ...]) -> None:
    target = parse_target(text)
    name, _, size = text.lower().partition(":")
    shape = tuple(int(part) for part in size.split("x"))
    assert (target.chip, target.topology, target.slices) == (CHIPS[name], shape, 1)
    assert (target.devices, target.hosts) == (prod(shape), hosts)
    assert target.rings == rings


def test_what_libtpu_is_told() -> None:
    flat = parse_target("v5e:8x16").topology_arguments
    assert flat["topology_name"] == "v5e:8x16"
    assert (flat["chips_per_host_bounds"], flat["num_slices"]) == ((2, 2, 1), 1)
    assert flat["wrap"] == (False, True, False)
    assert "chip_config_name" not in flat  # v5e has one core a chip
    assert parse_target("v5e:1x1").topology_arguments["chips_per_host_bounds"] == (1, 1, 1)
    assert parse_target("v6e:2x4").topology_arguments["chips_per_host_bounds"] == (2, 4, 1)
    cube = parse_target("v4:4x4x4").topology_arguments
    assert cube["wrap"] == (True, True, True)
    assert cube["chip_config_name"] == "megacore"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("h10:8", ("'h10'", "did you mean 'h100'?")),
        ("a100:8", ("which a100?", "a100-40", "a100-80")),
        (":8", ("hardware ''",)),
        ("h100", ("no size", "h100:8", "h100:64", "h100:4x2")),
        ("h100:", ("no size",)),
        ("v4", ("no size", "v4:2x2x1")),
        ("cpu", ("no size", "cpu:8")),
        ("h100:-1", ("'-1' is not a size", "h100:8")),
        ("h100:eight", ("'eight' is not a size",)),
        ("h100:8x", ("'8x' is not a size",)),
        ("h100:" + 5000 * "9", ("is not a size",)),
        ("h100:0", ("no devices", "1 is the minimum")),
        ("v5e:0x4", ("no devices",)),
        ("h100:12", ("8 must divide", "h100:8 or h100:16")),
        ("h100:2x16", ("16 devices per host", "have 8", "h100:32", "h100:2x8")),
        ("h100:2x2x2", ("3 numbers",)),
        ("cpu:2x4", ("cpu:8",)),
        ("v5e:4x2", ("no such slice", "v5e:2x4")),
        ("v5e:3x3", ("no such slice", "v5e:2x4 or v5e:4x4")),
        ("v5e:32x32", ("at most 256 chips", "v5e:16x16")),
        ("v5e:16", ("no topology", "v5e:4x4")),
        ("v5e:4x4x4", ("3 dimensions", "has 2", "v5e:8x8")),
        ("v4:8x8", ("2 dimensions", "has 3", "v4:4x4x4")),
        ("v4:4x8x4", ("no such slice: use v4:4x4x8",)),
        ("v4:32x4x16", ("no such slice: use v4:4x16x32",)),  # and not 8x16x16
        ("v4:5x5x5", ("v4:4x4x4 or v4:4x4x8",)),
        ("v4:16x16x32", ("at most 4096 chips", "v4:16x16x16")),
        ("v5p:16x20x28", ("at most 6144 chips", "v5p:16x16x24")),
        ("attached:8", ("write attached",)),
    ],
)
def test_a_wrong_target_is_refused_in_one_line(text: str, said: tuple[str, ...]) -> None:
    with refused(ConfigError, repr(text), *said):
        parse_target(text)


def test_cpu_devices_share_the_memory_of_their_host() -> None:
    one, eight = parse_target("cpu:1"), parse_target("cpu:8")
    assert (eight.devices, eight.hosts, eight.chip.platform) == (8, 1, "cpu")
    assert one.chip.memory_bytes is not None
    assert eight.chip.memory_bytes == one.chip.memory_bytes // 8
    assert one.with_devices(8) == eight
    with pytest.raises(ConfigError, match="cpu:8"):
        _ = eight.topology_arguments


def test_the_devices_of_this_process() -> None:
    target = parse_target("attached")
    assert (target.text, target.devices) == ("attached", len(jax.devices()))
    assert target.hosts == 1
    assert target.chip.kinds == CPU.kinds
    assert target.chip.memory_bytes == parse_target(f"cpu:{target.devices}").chip.memory_bytes


def device(kind: str, platform: str, process: int = 0, **more: Any) -> Any:
    stats = {"bytes_limit": 7 * 2**30}
    facts = {"device_kind": kind, "platform": platform, "process_index": process}
    return SimpleNamespace(**facts, memory_stats=lambda: stats, **more)


def test_attached_gpus_tell_their_memory() -> None:
    gpus = [device("NVIDIA H200", "gpu", process) for process in (0, 0, 1, 1)]
    target = attached_target(gpus)
    assert (target.chip.name, target.devices, target.hosts) == ("h200", 4, 2)
    assert target.chip.usable_bytes == 7 * 2**30
    assert target.chip.memory_bytes == CHIPS["h200"].memory_bytes
    assert "attached" in target.chip.sources["usable_bytes"]


def test_nothing_is_claimed_of_attached_devices_that_are_not_known() -> None:
    target = attached_target([device("NVIDIA H300", "gpu")])
    assert (target.chip.title, target.chip.usable_bytes) == ("NVIDIA H300", 7 * 2**30)
    assert (dict(target.chip.flops_per_second), target.chip.inside) == ({}, None)


def test_attached_tpus_tell_their_topology() -> None:
    chips = [device("TPU v5 lite", "tpu", coords=(x, y, 0)) for x in range(2) for y in range(4)]
    assert attached_target(chips).topology == (2, 4)
    assert attached_target(chips[:3]).topology == (1, 3)
    assert attached_target([chips[0], chips[5]]).topology is None  # not a box


@pytest.mark.parametrize(
    ("text", "devices", "becomes", "hosts"),
    [
        ("h100:8", 4, "h100:4", 1),
        ("h100:4", 16, "h100:16", 2),
        ("h100:3x4", 2, "h100:2", 1),
        ("h100:3x4", 8, "h100:2x4", 2),
        ("h100:16x1", 512, "h100:512x1", 512),
        ("v5e:16x16", 1, "v5e:1x1", 1),
        ("v5e:4x4", 256, "v5e:16x16", 64),
        ("v4:2x2x1", 128, "v4:4x4x8", 32),
        ("v4:2x2x1", 512, "v4:8x8x8", 128),
    ],
)
def test_the_same_hardware_with_other_numbers(
    text: str, devices: int, becomes: str, hosts: int
) -> None:
    target = parse_target(text).with_devices(devices)
    assert (target.text, target.devices, target.hosts) == (becomes, devices, hosts)
    assert target == parse_target(becomes)


def test_beyond_a_pod_are_several_slices() -> None:
    target = parse_target("v5e:4x4").with_devices(1024)
    assert (target.slices, target.topology, target.devices) == (4, (16, 16), 1024)
    assert (target.text, target.hosts) == ("4 x v5e:16x16", 256)
    assert target.topology_arguments["num_slices"] == 4
    v4 = parse_target("v4:2x2x1").with_devices(8192)
    assert (v4.slices, v4.topology) == (2, (16, 16, 16))


@pytest.mark.parametrize(
    ("text", "devices", "said"),
    [
        ("h100:8", 12, "use 8 or 16"),
        ("h100:2x4", 10, "use 8 or 12"),
        ("h100:8", 0, "1 is the minimum"),
        ("v5e:2x2", 2, "use 1 or 4"),
        ("v4:2x2x1", 96, "use 64 or 128"),
    ],
)
def test_numbers_that_do_not_exist(text: str, devices: int, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse_target(text).with_devices(devices)


def test_numbers_of_devices_up_to_many() -> None:
    assert list(parse_target("h100:8").device_counts(64)) == [1, 2, 4, 8, 16, 32, 64]
    assert list(parse_target("v5e:2x2").device_counts(600)) == [1, 4, 8, 16, 32, 64, 128, 256, 512]
    assert list(parse_target("v4:2x2x1").device_counts(10)) == [4, 8]
    assert max(parse_target("v5p:2x2x1").device_counts(10**5)) == 65536
