"""The place of a process, and whether process 0 can be reached."""

import dataclasses
import errno
import os
import re
import socket
import time
from collections.abc import Iterator

import pytest

from replicax.cluster.place import Place
from replicax.doctor.joined import check_coordinator, check_place
from replicax.text.checks import FAIL, NOTE, PASS, Check


def test_what_was_detected_and_from_where() -> None:
    env = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "node017", "MASTER_PORT": "29400"}
    (row,), place = check_place(env)
    assert row.verdict == PASS
    for word in ("process 1 of 4", "RANK", "WORLD_SIZE", "node017:29400", "MASTER_ADDR"):
        assert word in row.found
    assert row.figures["reasons"]["process"] == "RANK=1"
    assert place.process == 1


def test_a_contradiction_is_a_row() -> None:
    env = {
        "REPLICAX_PROCESS_ID": "2",
        "REPLICAX_PROCESSES": "2",
        "REPLICAX_COORDINATOR": "node017:29400",
    }
    (row,), place = check_place(env)
    assert place is None
    assert row.verdict == FAIL
    assert "REPLICAX_PROCESS_ID=2 with REPLICAX_PROCESSES=2" in row.found
    assert row.cause == "lower it"


@pytest.fixture
def listening() -> Iterator[int]:
    """A port that something listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


@pytest.fixture
def free() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
    return port


def place(process: int, address: str | None, **changed: object) -> Place:
    found = Place(process, 4, address, "ours", None, None, None, "test", {})
    return dataclasses.replace(found, **changed)  # type: ignore[arg-type]


def check(place: Place | None, timeout_seconds: float = 0.1) -> list[Check]:
    return check_coordinator(place, timeout_seconds, lambda line: None)


def test_a_port_that_is_taken(listening: int) -> None:
    (row,) = check(place(0, f"127.0.0.1:{listening}"))
    assert row.verdict == FAIL
    assert f"127.0.0.1:{listening}: {os.strerror(errno.EADDRINUSE)}" in row.found
    assert "REPLICAX_COORDINATOR" in row.cause


def test_process_0_on_another_host_than_its_name_says(free: int) -> None:
    (row,) = check(place(0, f"192.0.2.1:{free}"))  # an address for documentation
    assert row.verdict == NOTE
    assert re.search(r"192\.0\.2\.1 is not\b.*of this\b.*host", row.found)
    assert socket.gethostname() in row.found


@pytest.mark.parametrize("process", [0, 1])
def test_a_name_that_nobody_knows(process: int) -> None:
    (row,) = check(place(process, "no-such-host.invalid:29400"))
    assert row.verdict == FAIL
    assert "'no-such-host.invalid'" in row.found
    assert "address" in row.cause


def test_the_way_to_process_0(listening: int) -> None:
    (row,) = check(place(1, f"127.0.0.1:{listening}"))
    assert row.verdict == PASS
    assert 0 < row.figures["milliseconds"] < 5000


def test_nobody_listens(free: int) -> None:
    started = time.monotonic()
    (row,) = check(place(3, f"127.0.0.1:{free}"), timeout_seconds=0.3)
    assert 0.3 <= time.monotonic() - started < 3
    assert row.verdict == FAIL
    assert "connection refused" in row.found
    assert "start process 0" in row.cause


def test_a_loopback_name_for_several_hosts(free: int) -> None:
    (row,) = check(place(0, f"localhost:{free}", local_processes=2))
    assert row.verdict == FAIL
    assert re.search(r"4 processes are .*one host \(2 here\)", row.found)
    (row,) = check(place(0, f"localhost:{free}", local_processes=4))
    assert row.verdict == PASS
