"""Pinning: what it refuses, what it does to every thread, and how it is undone."""

import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from replicax.bench import machine
from replicax.bench.machine import Neighbours, only_cores, own_cores

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="cores are given out on Linux")


@pytest.fixture
def other_thread() -> Iterator[int]:
    """The id of a thread that does nothing."""
    ids: list[int] = []
    born, stop = threading.Event(), threading.Event()

    def wait() -> None:
        ids.append(threading.get_native_id())
        born.set()
        stop.wait()

    thread = threading.Thread(target=wait)
    thread.start()
    born.wait()
    yield ids[0]
    stop.set()
    thread.join()


def test_every_thread_is_moved_and_put_back(other_thread: int) -> None:
    before = os.sched_getaffinity(0)
    core = own_cores()[-1]
    with only_cores([core]):
        assert os.sched_getaffinity(0) == {core}
        assert os.sched_getaffinity(other_thread) == {core}
    assert os.sched_getaffinity(0) == before
    assert os.sched_getaffinity(other_thread) == before


def test_an_exception_puts_every_thread_back(other_thread: int) -> None:
    before = os.sched_getaffinity(0)
    with pytest.raises(ZeroDivisionError), only_cores(own_cores()[:1]):
        raise ZeroDivisionError
    assert os.sched_getaffinity(0) == before
    assert os.sched_getaffinity(other_thread) == before


def test_a_thread_born_inside_is_freed() -> None:
    before = os.sched_getaffinity(0)
    stop = threading.Event()
    with only_cores(own_cores()[:1]):
        thread = threading.Thread(target=stop.wait)
        thread.start()
        assert thread.native_id is not None
        assert os.sched_getaffinity(thread.native_id) == {own_cores()[0]}
    try:
        assert os.sched_getaffinity(thread.native_id) == before
    finally:
        stop.set()
        thread.join()


def test_a_physical_core_is_named_once_before_its_second_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for core, siblings in enumerate(["0-1", "0-1", "2-3", "2-3"]):
        folder = tmp_path / f"cpu{core}" / "topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{siblings}\n")
    monkeypatch.setattr(machine, "CPU_TOPOLOGY", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    assert own_cores() == [0, 2, 1, 3]


def test_neighbours_are_all_that_is_busy_but_this_process_and_its_children(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "time", SimpleNamespace(monotonic=iter([10.0, 14.0]).__next__))
    own = iter([(0.5, 0.5, 0.0, 0.0, 10.0), (1.0, 0.5, 1.0, 0.5, 14.0)])
    monkeypatch.setattr(os, "times", lambda: next(own))
    monkeypatch.setattr(machine, "STATISTICS", tmp_path / "stat")
    monkeypatch.setattr(os, "sysconf", lambda _: 100)
    (tmp_path / "stat").write_text("cpu  100 0 100 9000 9000 0 0 0 50 0\ncpu0 1\n")
    neighbours = Neighbours()
    (tmp_path / "stat").write_text("cpu  500 100 200 9100 9900 0 0 200 90 0\ncpu0 1\n")
    assert neighbours.cores() == (4 + 1 + 1 + 2 - 2) / 4


def test_without_statistics_nobody_is_accused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "STATISTICS", tmp_path / "none")
    assert Neighbours().cores() is None
