"""`host:port` and Slurm's lists: taken apart and put together, or refused by name."""

import contextlib
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replicax.cluster.slurm_step import expand_counts, expand_hosts
from replicax.errors import ConfigError
from replicax.net.address import join_address, split_address

NAMES = st.text(string.ascii_letters + string.digits + "-._", min_size=1, max_size=8)
HOSTS = NAMES | st.ip_addresses().map(str)
NUMBERS = st.integers(0, 120)
ANY = st.text(max_size=12) | st.text("n[]019,-:x() ", max_size=12)


@given(HOSTS, st.integers(1, 65535))
def test_any_address_there_and_back(host: str, port: int) -> None:
    address = join_address(host, port)
    assert split_address(address) == (host, port)
    assert address == (f"[{host}]:{port}" if ":" in host else f"{host}:{port}")


@given(ANY)
def test_what_is_no_address_is_named(text: str) -> None:
    with contextlib.suppress(ConfigError):
        host, port = split_address(text, "ADDRESS")
        assert split_address(join_address(host, port)) == (host, port)
        assert host


@pytest.mark.parametrize(
    "wrong",
    ["", "a", ":1", "a:", "[]:1", "[::1:1", "::1]:1", "[::1]", "u@a:1", "a b:1", "a:-1"],
)
def test_addresses_without_a_host_a_port_or_a_bracket_are_named(wrong: str) -> None:
    with pytest.raises(ConfigError, match="ADDRESS="):
        split_address(wrong, "ADDRESS")


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("node001,host2", ["node001", "host2"]),
        ("node[001-003,7],gpu1", ["node001", "node002", "node003", "node7", "gpu1"]),
        ("r[0-1]n[2,4]x", ["r0n2x", "r0n4x", "r1n2x", "r1n4x"]),
    ],
)
def test_hosts_as_slurm_writes_them(text: str, hosts: list[str]) -> None:
    assert expand_hosts(text, "LIST") == hosts


@given(st.lists(st.tuples(NUMBERS, st.integers(1, 5)), min_size=1, max_size=4))
def test_any_list_of_counts_is_expanded(parts: list[tuple[int, int]]) -> None:
    text = ",".join(f"{count}(x{times})" if times > 1 else str(count) for count, times in parts)
    assert expand_counts(text, "COUNTS") == [n for n, times in parts for _ in range(times)]


@given(ANY)
def test_what_is_no_list_is_named(text: str) -> None:
    with contextlib.suppress(ConfigError):
        assert all(expand_hosts(text, "LIST"))
        assert all(count >= 0 for count in expand_counts(text, "COUNTS"))


def test_lists_that_slurm_does_not_write_are_named() -> None:
    hosts = [",a", "a,,b", "n[1", "n1]", "n[]", "n[a-b]", "n[3-1]", "n[3-1,5]", "n[1-999999999]"]
    for wrong in ["", *hosts, "n[[1]]", "n[0-999]m[0-999]", "a[0-99999],b"]:
        with pytest.raises(ConfigError, match=r"LIST=.*not a\b.*list of\b.*hosts"):
            expand_hosts(wrong, "LIST")
    for wrong in ("", "x", "2(3)", "2(x)", "-1", "2(x99999999999)"):
        with pytest.raises(ConfigError, match=r"COUNTS=.*not a\b.*list of\b.*counts"):
            expand_counts(wrong, "COUNTS")
