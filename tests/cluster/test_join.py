"""Joining a job, as far as it goes without other processes; `test_faults.py` has real ones."""

import socket

import jax
import pytest
from support.cluster_jobs import free_port

from replicax.cluster import alike, join
from replicax.cluster.cluster_job import current_job
from replicax.cluster.join import initialize
from replicax.cluster.wire import Hello
from replicax.errors import ClusterError, ConfigError


@pytest.fixture(autouse=True)
def _not_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK"):
        monkeypatch.delenv(name, raising=False)


def test_a_lone_process_joins_nobody(capsys: pytest.CaptureFixture[str]) -> None:
    found = initialize()
    assert (found.process, found.processes, found.place.engine) == (0, 1, "nothing")
    assert initialize(processes=4) is found  # a second call gives what the first found
    assert capsys.readouterr().err == ""


def test_one_process_says_what_was_found(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REPLICAX_PROCESSES", "1")
    monkeypatch.setenv("REPLICAX_PROCESS_ID", "0")
    initialize()
    assert capsys.readouterr().err.startswith("replicax: process 0 of 1 (REPLICAX_PROCESS_ID")


def test_a_wrong_place_is_told_before_anything_is_waited_for() -> None:
    with pytest.raises(ConfigError, match="lower it"):
        initialize(coordinator="127.0.0.1:1", processes=2, process=2)
    assert current_job() is None


def test_a_wrong_patience_is_told_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REPLICAX_STALL_SECONDS", "soon")
    with pytest.raises(ConfigError, match="REPLICAX_STALL_SECONDS=soon"):
        initialize()


def test_jax_was_started_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(join, "watch_exceptions", lambda: None)
    with pytest.raises(
        ClusterError, match=r"^jax\.distributed\.initialize\(\) was called\b.*before"
    ):
        initialize(coordinator=f"127.0.0.1:{free_port()}", processes=2, process=1)


def test_versions_as_they_are_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = alike.versions()
    assert versions["jax"] == jax.__version__
    assert set(versions) == {"python", *alike._PACKAGES}
    monkeypatch.setattr(jax, "__version__", "0.0.1")
    assert alike.versions()["jax"] == "0.0.1"
    monkeypatch.setattr(alike, "_PACKAGES", ["no-such-package"])
    assert alike.versions()["no-such-package"] == "not installed"


def hello(host: str, gpus: tuple[str, ...], told: tuple[int, ...] | None = None) -> Hello:
    return Hello("ours", 0, 2, host, gpus=gpus, local_devices=told)


def test_devices_are_dealt_unless_told() -> None:
    seen = ("x", "y")
    assert join._prepare(7, [hello("a", seen), hello("a", seen)]) == (7, [(0,), (1,)])
    assert join._prepare(7, [hello("a", seen, (1,)), hello("a", seen)]) == (7, [(1,), None])


def test_the_port_for_jax_is_kept_until_it_listens() -> None:
    with join._hold_port("127.0.0.1") as held:
        port = held.getsockname()[1]
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port))
        with socket.socket() as service:
            service.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            service.bind(("127.0.0.1", port))
            service.listen()
