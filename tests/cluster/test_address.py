"""`host:port`, taken apart and put together."""

import pytest

from replicax.cluster.address import join_address, split_address
from replicax.errors import ConfigError


@pytest.mark.parametrize(
    ("address", "parts"),
    [
        ("node017:1", ("node017", 1)),
        ("10.0.0.7:65535", ("10.0.0.7", 65535)),
        ("[2620:10d::2]:29400", ("2620:10d::2", 29400)),
        ("a-b.c_d:80", ("a-b.c_d", 80)),
    ],
)
def test_there_and_back(address: str, parts: tuple[str, int]) -> None:
    assert split_address(address) == parts
    assert join_address(*parts) == address


@pytest.mark.parametrize(
    "address",
    [
        "",
        "a",
        ":1",
        "a:",
        "[]:1",
        "[::1:1",
        "::1]:1",
        "[::1]",
        "a b:1",
        "user@a:1",
        "a/b:1",
        "a:-1",
    ],
)
def test_what_is_no_address(address: str) -> None:
    with pytest.raises(ConfigError, match="ADDRESS="):
        split_address(address, "ADDRESS")
