"""Islands on Ray, without a cluster: who is started again, where, and how it ends."""

import contextlib
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from textwrap import dedent
from types import SimpleNamespace
from typing import Any

import pytest
from launch.fake_ray import FakeCluster, LostError, fake_cluster
from support.figures import assert_mentions
from support.waiting import until

from replicax.errors import ConfigError
from replicax.launch import on_ray
from replicax.launch.job_spec import JobSpec
from replicax.launch.on_ray import run_on_ray
from replicax.launch.ray_actors import RayProcess, ray_reason

BEGIN = """
    import os, pathlib, signal, sys, time
    island = int(os.environ["REPLICAX_ISLAND"])
    place = pathlib.Path(f"starts-{island}")
    with place.open("a") as file:
        print(os.environ["REPLICAX_ISLANDS"], file=file)
    start = len(place.read_text().split())
    def wait(name):
        while not os.path.exists(name):
            time.sleep(0.01)
"""


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeCluster:
    return fake_cluster(tmp_path, monkeypatch)


def job(script: str, islands: int, restarts: int = 3) -> JobSpec:
    command = sys.executable, "-S", "-c", dedent(BEGIN) + dedent(script)
    return JobSpec(command, 1, islands=islands, restarts=restarts, devices_per_process=2)


def run(cluster: FakeCluster, spec: JobSpec) -> tuple[int, str | None]:
    return run_on_ray(cluster, spec, {"CPU": 3, "GPU": 1})  # type: ignore[arg-type]


def starts(folder: Path, island: int) -> list[list[str]]:
    """Return the addresses that each start of an island was told."""
    return [line.split(",") for line in (folder / f"starts-{island}").read_text().split()]


@contextlib.contextmanager
def meanwhile(act: Callable[[], object]) -> Iterator[None]:
    thread = threading.Thread(target=act)
    thread.start()
    yield
    thread.join()


def test_each_island_has_a_bundle_and_an_address(
    cluster: FakeCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("REPLICAX_SECRET", "of the launcher")
    script = """
        names = "PROCESS_ID", "PROCESSES", "JOB_ID", "SECRET"
        told = [os.environ[f"REPLICAX_{name}"] for name in names]
        told += [os.environ["JAX_NUM_CPU_DEVICES"], os.environ["NCCL_DEBUG"]]
        pathlib.Path(f"told-{island}").write_text(" ".join(told))
    """
    assert run(cluster, job(script, 3)) == (0, None)
    assert cluster.bundles == [{"CPU": 3, "GPU": 1}] * 3
    assert [actor.bundle for actor in cluster.actors] == [0, 1, 2]
    assert {actor.options["num_gpus"] for actor in cluster.actors} == {1}
    (addresses,) = starts(tmp_path, 0)
    assert starts(tmp_path, 1) == starts(tmp_path, 2) == [addresses]
    assert len(set(addresses)) == 3
    assert all(re.fullmatch(r"127\.0\.0\.1:\d+", address) for address in addresses)
    told = {(tmp_path / f"told-{island}").read_text() for island in range(3)}
    rank, processes, _, secret, *others = told.pop().split()
    assert (rank, processes, len(secret), *others) == ("0", "1", 43, "2", "INFO")
    assert not told  # all know the same


@pytest.mark.parametrize("lost", [False, True])
def test_one_that_dies_is_started_again_elsewhere_and_the_others_never_stop(
    lost: bool, cluster: FakeCluster, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Either its command fails, or Ray loses its worker."""
    script = f"""
        if island == 1 and start == 1:
            open("here", "w").close()
            {"time.sleep(60)" if lost else "sys.exit(7)"}
        if island == 1:
            open("again", "w").close()
        wait("again")
        print("over", start)
    """

    def lose() -> None:
        until((tmp_path / "here").exists)
        if lost:
            cluster.actors[1].lose()

    with meanwhile(lose):
        assert run(cluster, job(script, 3)) == (0, None)
    assert [actor.bundle for actor in cluster.actors] == [0, 1, 2, 1]
    assert len(starts(tmp_path, 0)) == len(starts(tmp_path, 2)) == 1
    first, second = starts(tmp_path, 1)
    assert [before == now for before, now in zip(first, second, strict=True)] == [1, 0, 1]
    out, err = capfd.readouterr()
    assert {"[island 0] over 1", "[island 1] over 2", "[island 2] over 1"} <= {*out.splitlines()}
    (line,) = err.splitlines()
    assert line.startswith("replicax: island 1 died (")
    assert ("Actor 5 left." if lost else "exit code 7") in line
    assert line.endswith("(restart 1)")


def test_one_that_is_given_up_is_the_exit_code(cluster: FakeCluster, tmp_path: Path) -> None:
    code, said = run(cluster, job("sys.exit(2)", 1))
    assert code == 2
    assert_mentions(str(said), "island 0 died", "given up", "code 2")
    assert "see" not in str(said)  # no file of this host has its output
    assert len(starts(tmp_path, 0)) == 1


@pytest.mark.parametrize(("number", "exits"), [(signal.SIGTERM, 75), (signal.SIGINT, 130)])
def test_a_signal_reaches_all_and_none_is_started_again(
    number: int,
    exits: int,
    cluster: FakeCluster,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Islands that save, or that do not handle the signal."""
    handler = "lambda *_: sys.exit(75)" if exits == 75 else "signal.SIG_DFL"
    script = f"""
        signal.signal({int(number)}, {handler})
        open(f"ready-{{island}}", "w").close()
        time.sleep(60)
    """
    reads, writes = os.pipe()
    os.set_blocking(reads, False)
    monkeypatch.setattr(on_ray, "collected_signals", lambda: contextlib.nullcontext(reads))

    def interrupt() -> None:
        until(lambda: all((tmp_path / f"ready-{island}").exists() for island in range(2)))
        os.write(writes, bytes([number]))

    with meanwhile(interrupt):
        assert run(cluster, job(script, 2))[0] == exits
    assert len(cluster.actors) == 2
    os.close(reads)
    os.close(writes)


@pytest.mark.parametrize(("runs", "number"), [(False, signal.SIGTERM), (True, signal.SIGKILL)])
def test_one_that_the_launcher_kills_is_not_lost(runs: bool, number: int) -> None:
    """With its actor, as it has no process yet or must not go on."""
    answer = Future[Any]()
    ray = SimpleNamespace(
        exceptions=FakeCluster.exceptions,
        kill=lambda _: answer.set_exception(LostError("gone")),
    )
    reference = SimpleNamespace(future=lambda: answer)
    placed: Any = SimpleNamespace(
        ray=ray,
        begin=lambda _: (None, None if runs else reference),
        run=lambda *_: reference,
    )
    start: Any = None
    process = RayProcess(placed, start, 0)
    process.send(number)
    assert not process.listen()
    process.close()
    assert (process.ended().status, process.ended().report) == (-number, None)


@pytest.mark.parametrize(
    ("refuses", "code"),
    [(LostError("no node"), 1), (KeyboardInterrupt(), 130), (SystemExit(15), 143)],
)
def test_islands_that_are_not_placed(
    refuses: BaseException, code: int, cluster: FakeCluster, tmp_path: Path
) -> None:
    cluster.refuses = refuses
    exit_code, said = run(cluster, job("", 2))
    assert exit_code == code
    assert code != 1 or str(said).endswith(": no node")
    assert list(tmp_path.iterdir()) == []


def test_a_reason_of_ray_is_one_line_without_ids_and_frames() -> None:
    assert ray_reason(LostError("died:\n\tpid: 3\n  File x\nKilled.")) == "died: Killed."
    wrapped = LostError("a traceback")
    wrapped.cause = ConfigError("--x 3")  # type: ignore[attr-defined]
    assert ray_reason(wrapped) == "--x 3"
