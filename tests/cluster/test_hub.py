"""Processes that a job admits or refuses, and the harm that a stranger can do."""

import re
import socket
import time
import types
from typing import Any

import msgspec
import pytest
from support.cluster_jobs import VERSIONS, Job, opened, proven
from support.figures import assert_mentions
from support.waiting import HANG_SECONDS, until

from replicax.cluster import door
from replicax.cluster import hub as hub_module
from replicax.cluster.watchdog import StuckVerdict, Timeouts
from replicax.cluster.wire import Bye, Failed, Hello, encode
from replicax.errors import AgreementError, ClusterError

HELLO = Hello("ours", 1, 2, "h", 1, VERSIONS)
PROVEN = proven(HELLO)


def works(job: Job, processes: list[Any]) -> bool:
    """Return whether the job still works."""
    waiting = [job.call(p.gather, "still there", p.process) for p in processes]
    values = [each.result(timeout=HANG_SECONDS) for each in waiting]
    return values == [list(range(job.processes))] * job.processes


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


def test_all_come_and_learn_the_same() -> None:
    with opened(3) as job:
        processes = job.start()
        names = [f"process {p} ({socket.gethostname()}, pid " for p in range(3)]
        for process in processes:
            assert all(
                told.startswith(name) for told, name in zip(process.go.names, names, strict=True)
            )
        assert works(job, processes)


def test_what_is_prepared_reaches_all() -> None:
    job = Job(2, Timeouts(), HANG_SECONDS)
    job.open(lambda hellos: (700, [[hello.process] for hello in hellos]))
    try:
        told = [(p.go.port, p.go.local_devices) for p in job.start()]
        assert told == [(700, [[0], [1]])] * 2
    finally:
        job.close()


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


def test_an_id_that_exists_before_the_start() -> None:
    with opened(2) as job:
        first = job.come(0)
        until(lambda: job.hub._members)  # type: ignore[union-attr]
        assert "process 0 (" in refusal(job, 0)
        second = job.come(1)
        assert works(job, [first.result(timeout=HANG_SECONDS), second.result(timeout=HANG_SECONDS)])


def test_an_id_that_exists_after_the_start() -> None:
    with opened(2) as job:
        processes = job.start()
        said = refusal(job, 1)
        assert re.match(r"rejected by\b.*process 0: process 1 \(", said)
        assert re.search(r"\) is already\b.*\bjob$", said)
        assert works(job, processes)


def test_another_job() -> None:
    with opened(2) as job:
        processes = job.start()
        said = refusal(job, 1, job="theirs")
        assert re.match(r"rejected by\b.*process 0: another job .*REPLICAX_COORDINATOR", said)
        assert "ours" not in said
        assert works(job, processes)


def test_another_number_of_processes() -> None:
    with opened(2) as job:
        said = refusal(job, 2, processes=3)
        assert re.match(r"rejected by\b.*process 0: the job .* 2 processes, .*3$", said)
        assert works(job, job.start())


@pytest.mark.parametrize("process", [-1, 2])
def test_an_id_that_cannot_be(process: int) -> None:
    with opened(2) as job:
        stranger = job.stranger()
        stranger.sendall(encode(proven(msgspec.structs.replace(HELLO, process=process))))
        said = stranger.recv(1 << 16).decode()
        assert re.search(r"from 0 to 1, .*this process", said)
        assert str(process) in said
        assert works(job, job.start())


@pytest.mark.parametrize(
    "noise",
    [
        b"GET / HTTP/1.1\r\nHost: node\r\n\r\n",
        b"\x16\x03\x01\x00\xff\xfe\n",
        b"[]\n",
        b"{}\n",
        b'["Hello","ours"]\n',
        b'[["Hello"]]\n',
        encode(PROVEN).replace(b",1,", b',"many",'),
        encode(PROVEN).replace(b",1,", b",true,"),
        encode(PROVEN).replace(b",1,", b",1.0,"),
        encode(PROVEN).replace(b"{", b"[").replace(b"}", b"]"),
        b"[" * 60_000 + b"\n",
        encode(Bye()),
        b"\n",
    ],
)
def test_a_stranger_that_sends_noise(noise: bytes, caplog: pytest.LogCaptureFixture) -> None:
    with opened(2) as job:
        before, after = job.stranger(), job.stranger()
        before.sendall(noise)
        assert ends(before)
        processes = job.start()
        after.sendall(noise)
        assert ends(after)
        assert works(job, processes)
    assert not caplog.records  # asyncio logs what no task expected


def test_a_stranger_that_leaves(caplog: pytest.LogCaptureFixture) -> None:
    with opened(2) as job:
        job.stranger().close()
        half = job.stranger()
        half.sendall(b'["Hello",')
        half.close()
        assert works(job, job.start())
    assert not caplog.records


def test_a_stranger_that_never_ends_a_line() -> None:
    with opened(2) as job:
        stranger = job.stranger()
        with pytest.raises(OSError, match=r"."):  # it is cut off while it sends
            stranger.sendall(b"x" * 100_000_000)
        assert works(job, job.start())


def test_a_stranger_that_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(2) as job:
        with monkeypatch.context() as patch:
            patch.setattr(door, "HELLO_SECONDS", 0.2)
            assert ends(job.stranger())
        job.stranger()
        assert works(job, job.start())


def test_the_hub_closes_all_connections(caplog: pytest.LogCaptureFixture) -> None:
    with opened(2) as job:
        stranger = job.stranger()
        job.start()
        assert job.hub is not None
        job.hub.close()
        assert ends(stranger)
    assert not caplog.records


def test_a_hub_that_was_frozen_forgives_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    offset = [0.0]
    clock = types.SimpleNamespace(monotonic=lambda: time.monotonic() + offset[0])
    monkeypatch.setattr(hub_module, "time", clock)
    with opened(2, silent_seconds=4.0) as job:
        members = [job.stranger(), job.stranger()]
        for process, member in enumerate(members):
            member.sendall(encode(proven(msgspec.structs.replace(HELLO, process=process))))
        time.sleep(0.3)
        offset[0] = 100.0
        time.sleep(0.4)
        assert b'"Go"' in members[0].recv(1 << 16)
        assert job.hub is not None
        assert job.hub._verdict is None
        until(lambda: job.hub._verdict)  # type: ignore[union-attr]


def test_one_that_leaves_before_the_start_may_come_again() -> None:
    with opened(2) as job:
        stranger = job.stranger()
        stranger.sendall(encode(PROVEN))
        assert b"Tick" in stranger.recv(1 << 16)
        assert re.search(r"is already\b.*\bjob", refusal(job, 1))
        stranger.close()
        time.sleep(0.1)
        assert works(job, job.start())


def test_one_that_never_comes_is_named_to_all_that_came() -> None:
    with opened(4, timeout_seconds=1.0) as job:
        started = time.monotonic()
        for coming in [job.come(0), job.come(2)]:
            with pytest.raises(ClusterError) as caught:
                coming.result(timeout=HANG_SECONDS)
            assert re.match(r"processes 1 and 3 of 4 did not\b.*within 1 s: see", str(caught.value))
        assert time.monotonic() - started > 0.9
        assert re.search(r"processes 1 and 3 of 4 did not", refusal(job, 1))  # comes too late


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


def test_one_that_is_gone_without_a_word() -> None:
    with opened(3) as job:
        processes = job.start()
        processes[1].link.close()
        for process in (processes[0], processes[2]):
            verdict = process.stopped.result(timeout=HANG_SECONDS)
            assert list(verdict.blames) == [1]
            assert verdict.reason.startswith(processes[0].go.names[1])
            assert re.search(r"disconnected\b.*, last seen\b.* at step 0: killed", verdict.reason)


def test_one_that_was_done_may_go() -> None:
    with opened(2) as job:
        first, second = job.start()
        second.link.leave()
        second.link.close()
        time.sleep(0.3)
        assert not first.stopped.done()


def test_the_first_verdict_stands() -> None:
    with opened(3) as job:
        processes = job.start()
        processes[1].wire.send(Failed("ValueError: one", collateral=False))
        processes[2].wire.send(StuckVerdict("late", [0]))
        for process in processes:
            assert process.stopped.result(timeout=HANG_SECONDS).blames in ([1], [0])
        assert len({p.stopped.result().reason for p in processes}) == 1


def test_what_a_process_says_of_the_hub_that_slept() -> None:
    with opened(2) as job:
        first, second = job.start()
        said = StuckVerdict("process 0 sent no heartbeat for 5 s", [0], True)
        second.wire.send(said)
        second.wire.close()
        assert first.stopped.result(timeout=HANG_SECONDS) == said
