"""Processes that a job admits or refuses, and the harm that a stranger can do."""

import re
import socket
from typing import Any

import pytest
from support.cluster_jobs import Job, opened
from support.figures import assert_mentions, logged
from support.waiting import HANG_SECONDS

from replicax.cluster.watchdog import Timeouts
from replicax.cluster.wire import Bye, Hello
from replicax.errors import AgreementError, ClusterError
from replicax.net.message import encode, prefixed


def refusal(ours: Job, process: int, **more: Any) -> str:
    with pytest.raises(ClusterError) as caught:
        ours.come(process, **more).result(timeout=HANG_SECONDS)
    return str(caught.value)


def ends(stranger: socket.socket) -> bool:
    """Return whether the hub closes the connection, whatever it sends first."""
    try:
        while stranger.recv(1 << 16):
            pass
    except ConnectionResetError:
        pass
    return True


def test_what_cannot_be_prepared_ends_all() -> None:
    def prepare(hellos: list[Hello]) -> list[Any]:
        raise ValueError("2 GPUs for 3 processes")

    job = Job(2, Timeouts(), HANG_SECONDS)
    job.open(prepare)
    try:
        for coming in [job.come(0), job.come(1)]:
            with pytest.raises(AgreementError, match="2 GPUs for 3 processes"):
                coming.result(timeout=HANG_SECONDS)
    finally:
        job.close()


@pytest.mark.promise("faults.second-with-same-rank")
def test_an_id_that_exists_after_the_start() -> None:
    with opened(2) as job:
        processes = job.start()
        said = refusal(job, 1)
        assert re.match(r"rejected by\b.*process 0: process 1 \(", said)
        assert re.search(r"\) is already\b.*\bjob$", said)
        assert job.works(processes)


@pytest.mark.promise("outside.strangers")
def test_a_stranger_that_sends_noise(caplog: pytest.LogCaptureFixture) -> None:
    """`test_hub_events.py` has any noise, without sockets."""
    web = b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"
    kinds = [web, prefixed(b"[" * 60_000), encode(Bye()), b"\n" * 20]
    with opened(2) as job:
        after = [job.stranger() for _ in kinds]
        for noise in kinds:
            before = job.stranger()
            before.sendall(noise)
            assert ends(before)
        processes = job.start()
        for noise, stranger in zip(kinds, after, strict=True):
            stranger.sendall(noise)
            assert ends(stranger)
        assert job.works(processes)
    assert not logged(caplog)  # asyncio logs what no task expected


def test_the_hub_closes_all_connections(caplog: pytest.LogCaptureFixture) -> None:
    with opened(2) as job:
        stranger = job.stranger()
        job.start()
        assert job.hub is not None
        job.hub.close()
        assert ends(stranger)
    assert not logged(caplog)


@pytest.mark.promise("faults.another-environment")
def test_versions_that_differ_end_all() -> None:
    with opened(3) as job:
        coming = [
            job.come(p, versions={"python": "3.13.1", "jax": "0.10.2" if p != 1 else "0.11.0"})
            for p in range(3)
        ]
        for each in coming:
            with pytest.raises(AgreementError) as caught:
                each.result(timeout=HANG_SECONDS)
            said = str(caught.value)
            assert_mentions(
                said, "processes differ: jax is 0.11.0 on process 1, 0.10.2 on processes 0 and 2: "
            )
