"""How a process finds the hub, and the error if it does not."""

import contextlib
import errno
import os
import re
import socket
import threading
import time

import pytest
from support.cluster_jobs import NO_SECRET, Job, free_port, opened, place
from support.figures import assert_mentions
from support.waiting import HANG_SECONDS

from replicax.cluster import rendezvous
from replicax.cluster.hub import Hub
from replicax.cluster.rendezvous import meet
from replicax.cluster.watchdog import Timeouts
from replicax.cluster.wire import Busy, Go, Hello, Prove
from replicax.errors import ClusterError
from replicax.net.message import encode
from replicax.net.proof import Proof


def opening(port: int, job: str = "theirs") -> str:
    with pytest.raises(ClusterError) as caught:
        Hub(place(0, 2, port, job), Timeouts(), 5.0, lambda hellos: ())
    return str(caught.value)


def going(coordinator: str, seconds: float, said: list[str] | None = None) -> str:
    with pytest.raises(ClusterError) as caught:
        meet(
            coordinator,
            Hello("ours", 1, 2),
            NO_SECRET,
            seconds,
            (said if said is not None else []).append,
        )
    return str(caught.value)


@pytest.mark.promise("faults.second-job-on-port")
@pytest.mark.parametrize("job", ["theirs", "ours"])
def test_the_port_is_another_job_s(job: str) -> None:
    with opened(2) as ours:
        processes = ours.start()
        said = opening(ours.port, job)
        assert_mentions(said, f"127.0.0.1:{ours.port}", os.strerror(errno.EADDRINUSE))
        assert_mentions(said, "(another job" if job == "theirs" else "2 processes, already")
        assert "'ours'" not in said
        assert_mentions(said, "process 0 cannot", "stop the", "set REPLICAX_COORDINATOR")
        assert not any(process.stopped.done() for process in processes)


def test_the_port_is_something_else_s() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        said = opening(port)
    assert said.startswith("process 0 cannot listen")
    assert f"127.0.0.1:{port}: {os.strerror(errno.EADDRINUSE)}; " in said
    assert "job '" not in said


@pytest.mark.promise("faults.never-joins")
def test_nothing_listens() -> None:
    port = free_port()
    started = time.monotonic()
    said = going(f"127.0.0.1:{port}", 0.5)
    assert 0.4 < time.monotonic() - started < 2.0
    assert_mentions(
        said, "could not", f"process 0 at 127.0.0.1:{port} within ", "connection refused"
    )
    assert said.endswith("or failed")


def test_process_0_comes_later() -> None:
    job = Job(2, Timeouts(), HANG_SECONDS)
    early = job.come(1)
    time.sleep(0.3)
    job.open()
    assert [p.result(timeout=HANG_SECONDS).process for p in (job.come(0), early)] == [0, 1]
    job.close()


def test_a_host_that_nobody_knows() -> None:
    said = going("no-such-host.invalid:29400", 0.3)
    assert re.search(r"'no-such-host\.invalid' cannot\b.*resolved", said)


def test_a_host_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def connect(address: tuple[str, int], timeout: float) -> None:
        time.sleep(timeout)
        raise TimeoutError("timed out")

    monkeypatch.setattr(socket, "create_connection", connect)
    started = time.monotonic()
    said = going("10.255.255.1:29400", 0.4)
    assert time.monotonic() - started < 2.0
    assert re.search(r"timed out: .*firewall, .*wrong address$", said)


IMPOSTOR = [encode(Prove("n")), encode(Proof("0" * 64)), encode(Go(["it"]))]


@pytest.mark.parametrize(
    "answer", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n", IMPOSTOR[2], b"".join(IMPOSTOR)]
)
def test_what_listens_hangs_up(answer: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def hang_up() -> None:
            with server.accept()[0] as connected:
                connected.recv(1 << 16)
                connected.sendall(answer)

        thread = threading.Thread(target=hang_up)
        thread.start()
        said = going(f"127.0.0.1:{server.getsockname()[1]}", 2.0)
        thread.join()
    assert re.search(r"not process 0 of\b.*Replicax job, .*just ended", said)


def test_a_process_that_finds_no_place_says_so_in_time() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def turn_away() -> None:
            with contextlib.suppress(OSError):
                while True:
                    with server.accept()[0] as connected:
                        connected.sendall(encode(Busy()))

        thread = threading.Thread(target=turn_away)
        thread.start()
        coordinator = f"127.0.0.1:{server.getsockname()[1]}"
        assert_mentions(going(coordinator, 0.3), f"{coordinator} had", "place", "within 0 s")
        server.shutdown(socket.SHUT_RDWR)
        thread.join()


def test_it_says_for_whom_it_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "_SAY_SECONDS", 0.1)
    with opened(3, silent_seconds=0.8, timeout_seconds=2.0) as job:
        with pytest.raises(ClusterError):
            job.come(0).result(timeout=HANG_SECONDS)
        assert any(re.match("still waiting .* processes 1 and 2 after ", line) for line in job.said)


def test_it_says_that_it_cannot_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "_SAY_SECONDS", 0.1)
    said: list[str] = []
    going(f"127.0.0.1:{free_port()}", 0.7, said)
    assert said
    assert re.search(r"cannot reach .* 0 at 127\.0\.0\.1:", said[0])
