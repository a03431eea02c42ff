"""Slurm's compressed lists."""

import pytest

from replicax.cluster.slurm_step import expand_counts, expand_hosts
from replicax.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("node1", ["node1"]),
        ("node001,host2", ["node001", "host2"]),
        ("node[001-003,7],gpu1", ["node001", "node002", "node003", "node7", "gpu1"]),
        ("n[9-11]", ["n9", "n10", "n11"]),
        ("r[0-1]n[2,4]x", ["r0n2x", "r0n4x", "r1n2x", "r1n4x"]),
        ("a-b[08-10].c.d", ["a-b08.c.d", "a-b09.c.d", "a-b10.c.d"]),
    ],
)
def test_hosts(text: str, hosts: list[str]) -> None:
    assert expand_hosts(text, "LIST") == hosts


@pytest.mark.parametrize(
    "text",
    [
        "",
        ",a",
        "a,,b",
        "n[1",
        "n1]",
        "n[]",
        "n[a-b]",
        "n[3-1]",
        "n[3-1,5]",
        "n[1-999999999]",
        "n[[1]]",
        "n[0-999]m[0-999]",
        "a[0-99999],b",
    ],
)
def test_not_hosts(text: str) -> None:
    with pytest.raises(ConfigError, match=r"LIST=.*not a\b.*list of\b.*hosts"):
        expand_hosts(text, "LIST")


def test_counts() -> None:
    assert expand_counts("2(x3),1", "COUNTS") == [2, 2, 2, 1]
    assert expand_counts("4", "COUNTS") == [4]
    assert expand_counts("1,3", "COUNTS") == [1, 3]
    for text in ("", "x", "2(3)", "2(x)", "-1", "2(x99999999999)"):
        with pytest.raises(ConfigError, match=r"COUNTS=.*not a\b.*list of\b.*counts"):
            expand_counts(text, "COUNTS")
