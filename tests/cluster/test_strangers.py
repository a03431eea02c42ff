"""A stranger at the port of a job can neither join it, nor stop it, nor fill its memory.

`benchmarks/strangers.py` does the same to real processes, ten thousand times.
"""

import asyncio
import contextlib
import socket

import pytest
from support.cluster_jobs import opened
from support.figures import logged
from support.strangers import Strangers
from support.tiers import only
from support.waiting import HANG_SECONDS, until

from replicax.cluster import hub as hub_module
from replicax.cluster.job_listener import JobListener
from replicax.cluster.wire import Busy, Gather
from replicax.net.message import encode
from replicax.net.secret import Secret
from replicax.net.sockets import MORE_STRANGERS

SECRET = Secret(b"a secret that nobody guesses")


def closed(connection: socket.socket) -> bool:
    """Return whether the other end has closed it by now."""
    connection.setblocking(False)
    try:
        while connection.recv(1 << 16):
            pass
    except BlockingIOError:
        return False
    except ConnectionError:
        pass
    return True


def told(connection: socket.socket) -> bytes:
    """Return what the other end has said."""
    connection.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        return connection.recv(1 << 16, socket.MSG_PEEK)
    return b""


@pytest.mark.promise("outside.strangers")
@pytest.mark.parametrize("started", only([True], [False, True]))
def test_a_job_goes_on_whatever_strangers_say(
    started: bool, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    with opened(2, secret=SECRET) as job:
        processes = job.start() if started else []
        strangers = Strangers(job.port, "ours", 2, seed=int(started))
        for number in range(150):
            strangers.come()
            assert not processes or number % 10 or job.works(processes, f"after {number}")
        strangers.leave()
        assert strangers.let_in == 0
        assert job.works(processes or job.start())
        assert not any(process.stopped.done() for process in processes)
    assert not logged(caplog)
    assert capfd.readouterr() == ("", "")


def test_few_strangers_are_open_at_once() -> None:
    with opened(2, secret=SECRET) as job:
        most = 2 + MORE_STRANGERS
        strangers = [job.stranger() for _ in range(3 * most)]
        busy = encode(Busy())
        until(lambda: sum(told(each) == busy for each in strangers) == 2 * most)
        until(lambda: sum(map(closed, strangers)) == 2 * most)
        assert job.works(job.start())  # they take the places of two


@pytest.mark.promise("outside.strangers")
def test_a_stranger_is_cut_off_before_it_fills_the_memory() -> None:
    with opened(2, secret=SECRET) as job:
        processes = job.start()
        stranger = job.stranger()
        sent = 0
        with contextlib.suppress(ConnectionError):
            while sent < 60_000_000:
                sent += stranger.send(b"x" * 100_000)
        assert sent < 20_000_000  # the system's own buffers, of the two ends
        assert job.works(processes)


def test_a_process_does_not_fill_the_memory_with_topics(monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(2) as job:
        first, second = job.start()
        with contextlib.suppress(OSError):
            for number in range(10_000):
                second.wire.send(Gather(f"topic {number}", "x" * 10_000))
        assert list(first.stopped.result(timeout=HANG_SECONDS).blames) == [1]
        assert len(job.hub._gathers) <= hub_module._MOST_TOPICS + 1  # type: ignore[union-attr]


@pytest.mark.parametrize("turns", range(8))
def test_the_door_closes_while_it_lets_somebody_in(turns: int) -> None:
    async def closes() -> None:
        listener = JobListener(2, lambda peer, message: None, lambda peer: None)
        listening = socket.create_server(("127.0.0.1", 0))
        with listening, socket.create_connection(listening.getsockname()):
            serving = asyncio.ensure_future(listener.serve(listening))
            for _ in range(turns):
                await asyncio.sleep(0)
            serving.cancel()
            listener.close()
            with pytest.raises(asyncio.CancelledError):
                await serving

    asyncio.run(closes())
