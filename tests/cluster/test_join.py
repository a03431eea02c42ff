"""Joining a job, without other processes; `test_faults.py` has real ones."""

import os
import socket
from pathlib import Path

import jax
import pytest
from support.cluster_jobs import free_port
from support.figures import assert_mentions
from support.processes import run_job

from replicax.cluster import join
from replicax.cluster.wire import Hello
from replicax.errors import ClusterError, ConfigError
from replicax.islands.initialize import initialize
from replicax.net.sockets import bind_port


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


def test_a_proxy_is_not_between_the_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    for before, after in (
        ({}, None),
        ({"http_proxy": "p"}, "node017"),
        ({"grpc_proxy": "p", "no_proxy": "a,b"}, "a,b,node017"),
        ({"https_proxy": "p", "no_grpc_proxy": "c", "no_proxy": "a"}, "c,node017"),
    ):
        monkeypatch.setattr(os, "environ", dict(before))
        join._exempt_from_proxies("node017")
        assert os.environ.get("no_grpc_proxy") == after  # noqa: SIM112 (as gRPC spells it)


@pytest.mark.exhaustive
def test_a_job_starts_where_a_proxy_is_set(tmp_path: Path) -> None:
    (tmp_path / "stop").touch()
    env = dict.fromkeys(("http_proxy", "https_proxy"), "http://127.0.0.1:9")
    script = Path(__file__).parents[1] / "support" / "strangers_job.py"
    ended = run_job(script, tmp_path, env=env, timeout_seconds=60.0)
    assert [each.code for each in ended] == [0, 0]


def test_a_host_that_does_not_know_its_own_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(name: str, port: None) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    join._check_own_name()
    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(ClusterError, match=f"{socket.gethostname()}.*/etc/hosts") as caught:
        initialize(coordinator=f"127.0.0.1:{free_port()}", processes=2, process=1)
    assert "\n" not in str(caught.value)


def test_processors_that_differ_are_told_and_allowed(capsys: pytest.CaptureFixture[str]) -> None:
    hellos = [Hello("ours", p, 2, processor={"processor": f"model {p}"}) for p in range(2)]
    join._prepare(7, hellos)
    assert_mentions(capsys.readouterr().err, "processor", "model 1 on", "process 1, model 0")
    join._prepare(7, hellos[:1] * 2)
    assert capsys.readouterr().err == ""


def hello(host: str, gpus: tuple[str, ...], told: tuple[int, ...] | None = None) -> Hello:
    return Hello("ours", 0, 2, host, gpus=gpus, local_devices=told)


def test_devices_are_dealt_unless_told() -> None:
    seen = ("x", "y")
    assert join._prepare(7, [hello("a", seen), hello("a", seen)]) == (7, [(0,), (1,)])
    assert join._prepare(7, [hello("a", seen, (1,)), hello("a", seen)]) == (7, [(1,), None])


def test_the_port_for_jax_is_kept_until_it_listens() -> None:
    with bind_port("127.0.0.1", 0, socket.SO_REUSEPORT) as held:
        port = held.getsockname()[1]
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port))
        with socket.socket() as service:
            service.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            service.bind(("127.0.0.1", port))
            service.listen()
