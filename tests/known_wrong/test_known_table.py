"""The table of versions that compute wrong numbers: its rows, and whom they concern."""

import importlib.metadata
import re

import jax
import pytest

from replicax.known_wrong.avoidance import knows
from replicax.known_wrong.known_table import KnownWrong, concerning, known_table
from replicax.known_wrong.self_tests import SELF_TESTS

PLATFORMS = ["cpu", "gpu", "tpu"]


def names(versions: dict[str, str], platform: str, *kinds: str, flags: str = "") -> list[str]:
    return [row.name for row in concerning(versions, platform, kinds or ("",), flags)]


@pytest.mark.parametrize("row", known_table(), ids=lambda row: row.name)
def test_a_row_is_complete(row: KnownWrong) -> None:
    assert row.platform in PLATFORMS
    assert row.wrong
    assert row.fix
    assert re.match(r"https://|\w+: ", row.link)
    assert row.answer in ("avoid", "say", "refuse", "list")
    assert bool(row.options) == (row.answer == "avoid")
    assert row.self_test in ("", *SELF_TESTS)
    assert row.answer != "refuse" or row.self_test


@pytest.mark.parametrize(
    ("versions", "platform", "wanted"),
    [
        ({"jaxlib": "0.10.1"}, "cpu", []),
        ({"jaxlib": "0.10.2"}, "cpu", ["product-then-sum"]),
        ({"jaxlib": "0.10.2.post1"}, "cpu", ["product-then-sum"]),
        ({"jaxlib": "0.12.0.1"}, "cpu", []),
        ({"jax": "0.11.1", "jaxlib": "0.11.1"}, "gpu", ["gradient-of-max"]),
        ({"jax": "0.11.0", "jaxlib": "0.11.0"}, "gpu", ["gradient-of-max", "scan-of-vmap"]),
        ({"jax": "0.11.2", "jaxlib": "0.11.2"}, "gpu", []),
        ({"nvidia-cudnn-cu13": "9.27.0.42"}, "gpu", ["large-attention"]),
        ({"nvidia-cudnn-cu13": "9.20.0.48"}, "gpu", []),
        ({"libtpu": "0.0.48"}, "tpu", ["loop-all-reduce", "eager-gather"]),
        ({"libtpu": "0.0.50.1"}, "tpu", ["eager-gather"]),
        ({"libtpu": "0.0.41"}, "tpu", []),
    ],
)
def test_a_version_is_in_the_range_or_outside(
    versions: dict[str, str], platform: str, wanted: list[str]
) -> None:
    listed = {row.name for row in known_table() if row.answer == "list"}
    assert [name for name in names(versions, platform) if name not in listed] == wanted


def test_only_some_devices_and_some_flags_are_concerned() -> None:
    versions = {"jaxlib": "0.11.1"}
    kinds = "NVIDIA RTX A6000", "NVIDIA H200"
    concerned = ["operation-by-operation" in names(versions, "gpu", kind) for kind in kinds]
    assert concerned == [True, False]
    captured = "--xla_gpu_enable_command_buffer=FUSION,COLLECTIVES --xla_dump_to=x"
    assert "collectives-in-command-buffers" in names(versions, "gpu", flags=captured)
    kept_out = "--xla_gpu_enable_command_buffer=FUSION,COLLECTIVES_KERNEL"
    assert "collectives-in-command-buffers" not in names(versions, "gpu", flags=kept_out)


def test_the_compiler_knows_the_options_of_its_rows() -> None:
    for row in known_table():
        if row.platform == jax.default_backend():
            assert knows(row.platform, row.options)
    assert not knows("cpu", {"xla_no_such_option": True})


@pytest.mark.parametrize(
    "row", [row for row in known_table() if row.self_test], ids=lambda row: row.name
)
def test_a_self_test_agrees_with_its_row(row: KnownWrong) -> None:
    """Some can be wrong on a CPU only, some on all devices, others on none that is here."""
    on_cpus = row.platform == "cpu" or row.name == "gradient-of-max"
    concerned = on_cpus and row.holds(importlib.metadata.version(row.package))
    assert SELF_TESTS[row.self_test]({}) == concerned
    if concerned and row.answer == "avoid":
        assert not SELF_TESTS[row.self_test](row.options)
