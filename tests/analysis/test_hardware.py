"""The table of hardware is consistent and gives its sources."""

import dataclasses
import re

import pytest

from replicax.analysis.hardware import CHIPS, GIB, Chip, Interconnect, chip_of_kind

IDENTITY = {"name", "title", "platform", "kinds", "sources"}


@pytest.mark.parametrize("name", CHIPS)
def test_every_fact_has_a_source(name: str) -> None:
    chip = CHIPS[name]
    for fact in dataclasses.fields(Chip):
        value = getattr(chip, fact.name)
        if fact.name in IDENTITY or value is None or value == 0:
            continue
        told = value.source if isinstance(value, Interconnect) else chip.sources.get(fact.name)
        assert told, f"{name}: {fact.name}"
    assert set(chip.sources) <= {fact.name for fact in dataclasses.fields(Chip)}


@pytest.mark.parametrize("name", CHIPS)
def test_facts_are_in_the_right_units(name: str) -> None:
    chip = CHIPS[name]
    assert chip.memory_bytes is not None
    assert chip.usable_bytes is not None
    assert chip.memory_bytes_per_second is not None
    assert 5 * GIB < chip.usable_bytes < chip.memory_bytes < 200 * GIB
    assert 1e11 < chip.memory_bytes_per_second < 1e13
    rates = chip.flops_per_second
    assert set(rates) <= {"float32", "bfloat16", "float16"}
    if chip.platform == "cuda" and "bfloat16" in rates:
        assert rates["float16"] == rates["bfloat16"]
    assert all(1e12 < rate < 1e16 for rate in chip.flops_per_second.values())
    for link in (chip.inside, chip.between):
        if link is not None:
            assert 1e9 < link.bytes_per_second < chip.memory_bytes_per_second
            assert 1e-7 < link.latency_seconds < 1e-3


@pytest.mark.parametrize("name", CHIPS)
def test_links_get_slower_outwards(name: str) -> None:
    chip = CHIPS[name]
    assert chip.inside is not None
    if chip.between is not None:
        assert chip.between.bytes_per_second < chip.inside.bytes_per_second
        assert chip.between.latency_seconds > chip.inside.latency_seconds


@pytest.mark.parametrize(
    ("name", "gigabytes"),
    [("p100", 16), ("v100", 32), ("a100-40", 40), ("a100-80", 80), ("h100", 80), ("h200", 141)],
)
def test_memory_is_a_little_less_than_sold(name: str, gigabytes: int) -> None:
    memory, usable = CHIPS[name].memory_bytes, CHIPS[name].usable_bytes
    assert memory is not None
    assert usable is not None
    assert 0.98 * gigabytes * GIB < memory <= gigabytes * GIB
    assert usable == int(memory * 3 / 4)  # JAX preallocates that much


@pytest.mark.parametrize(
    ("name", "both_directions"),
    [("p100", 160), ("v100", 300), ("a100-80", 600), ("h100", 900), ("h200", 900), ("b200", 1800)],
)
def test_nvlink_carries_less_than_its_data_sheet_says(name: str, both_directions: int) -> None:
    """Data sheets count both directions, and the raw rate."""
    inside = CHIPS[name].inside
    raw = both_directions / 2 * 1e9
    assert 0.75 * raw < inside.bytes_per_second < 0.95 * raw


@pytest.mark.parametrize(
    ("name", "bisection", "within"), [("v5e", 1.6e12, 0), ("v6e", 3.2e12, 0), ("v4", 24e12, 0.05)]
)
def test_one_link_of_a_torus_agrees_with_the_pods_bisection(
    name: str, bisection: float, within: float
) -> None:
    """Google's pages tell a pod's bisection: half of a torus is joined to the rest by 2 faces."""
    chip = CHIPS[name]
    link = chip.inside.bytes_per_second / (2 * chip.torus_dims)
    face = 16 ** (chip.torus_dims - 1)
    assert 2 * face * link == pytest.approx(bisection, rel=within or 1e-9)


def test_gpus_share_the_network_of_their_host() -> None:
    """DGX-1 has 4 ports of 100 Gbit/s for 8 GPUs, DGX A100 8 of 200, DGX H100 8 of 400."""
    for name, gigabits in (("v100", 50), ("a100-80", 200), ("h100", 400), ("b200", 400)):
        between = CHIPS[name].between
        assert between.bytes_per_second * 8 == gigabits * 1e9


def test_a_card_without_a_host_of_its_own_has_no_network() -> None:
    assert CHIPS["rtx4090"].between is None
    assert CHIPS["h100-pcie"].between is None


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("Tesla P100-SXM2-16GB", "p100"),
        ("Tesla V100-SXM2-16GB", "v100-16"),
        ("Tesla V100-SXM2-32GB", "v100"),
        ("Tesla V100-SXM3-32GB-H", "v100"),
        ("Tesla V100-PCIE-32GB", "v100-pcie"),
        ("NVIDIA A100-SXM4-40GB", "a100-40"),
        ("A100-SXM4-80GB", "a100-80"),
        ("NVIDIA A100 80GB PCIe", "a100-pcie-80"),
        ("NVIDIA A100-PCIE-40GB", "a100-pcie-40"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA B200", "b200"),
        ("TPU v4", "v4"),
        ("TPU v5 lite", "v5e"),
        ("TPU v5", "v5p"),
        ("TPU v6 lite", "v6e"),
    ],
)
def test_a_device_finds_its_chip_and_no_other(kind: str, name: str) -> None:
    assert [chip.name for chip in CHIPS.values() if re.fullmatch(chip.kinds, kind)] == [name]
    assert chip_of_kind(kind) is CHIPS[name]


@pytest.mark.parametrize("kind", ["cpu", "NVIDIA B200 MIG 1g.23gb", "NVIDIA H200 NVL", ""])
def test_a_device_that_only_looks_like_a_known_one_has_no_chip(kind: str) -> None:
    assert chip_of_kind(kind) is None
