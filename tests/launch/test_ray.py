"""Decisions about a job on Ray, without a cluster; tests/engines runs one."""

import re
import sys
import threading
from pathlib import Path
from textwrap import dedent

import pytest
from launch.fake_ray import fake_cluster
from support.figures import assert_mentions
from support.waiting import until

from replicax.errors import ClusterError, ConfigError
from replicax.launch import on_ray
from replicax.launch.job_spec import JobSpec
from replicax.launch.on_ray import RayOptions, launch_on_ray
from replicax.launch.process import free_port


@pytest.mark.parametrize(
    ("job", "options", "message"),
    [
        ({"pin": True}, {}, "--pin with --on ray; .*--cpus-per-process"),
        ({"islands": 3}, {}, "--processes 2 .*--islands 3 .*--on ray"),
        ({}, {"gpus_per_process": -1}, "--gpus-per-process -1; .* at least 0"),
        ({}, {"cpus_per_process": 0}, "--cpus-per-process 0; .* at least 1"),
    ],
)
def test_numbers_that_cannot_be_meant(
    job: dict[str, int], options: dict[str, int], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        launch_on_ray(JobSpec(("true",), 2, **job), RayOptions(**options))  # type: ignore[arg-type]


def test_an_address_where_nothing_listens_is_named() -> None:
    address = f"127.0.0.1:{free_port()}"
    with pytest.raises(ClusterError, match=f"RAY_ADDRESS={address} .*be reached .*ray start"):
        on_ray._reach(address, "RAY_ADDRESS")


def test_an_address_without_a_port_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--address=here; .*host:port"):
        on_ray._reach("here", "--address")


def job(script: str, processes: int, restarts: int = 0) -> JobSpec:
    command = sys.executable, "-S", "-c", dedent(BEGIN) + dedent(script)
    return JobSpec(command, processes, devices_per_process=3, restarts=restarts)


BEGIN = """
    import os, pathlib, sys, time
    process = os.environ["REPLICAX_PROCESS_ID"]
    def told(name):
        pathlib.Path(f"{name}-{process}").touch()
    def wait(name):
        while not os.path.exists(name):
            time.sleep(0.01)
"""


def test_each_process_has_its_place_in_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They run in the launcher's folder, with its variables of JAX."""
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("REPLICAX_SECRET", "of the launcher")
    names = "PROCESSES", "COORDINATOR", "JOB_ID", "SECRET"
    script = f"""
        names = ["REPLICAX_" + name for name in {names}]
        told = map(os.environ.get, [*names, "JAX_NUM_CPU_DEVICES", "NCCL_DEBUG"])
        pathlib.Path("told-" + process).write_text(" ".join(told))
    """
    cluster = fake_cluster(tmp_path, monkeypatch)
    assert on_ray.run_on_ray(cluster, job(script, 2), {"CPU": 1}) == (0, None)  # type: ignore[arg-type]
    assert [actor.bundle for actor in cluster.actors] == [0, 1]
    (told,) = {(tmp_path / f"told-{process}").read_text() for process in range(2)}
    processes, coordinator, _, secret, *others = told.split()
    assert (processes, len(secret), *others) == ("2", 43, "3", "INFO")
    assert re.fullmatch(r"127\.0\.0\.1:\d+", coordinator)


@pytest.mark.parametrize("lost", [False, True])
def test_all_are_started_again_after_a_failure_and_the_first_is_named(
    lost: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Either a command fails, or Ray loses a worker; the other process ends with it."""
    script = f"""
        if process == "1":
            told("here")
            {"time.sleep(60)" if lost else "sys.exit(7)"}
        wait("never")
    """
    cluster = fake_cluster(tmp_path, monkeypatch)

    def lose() -> None:
        for attempt in range(2 if lost else 0):
            until((tmp_path / "here-1").exists)
            (tmp_path / "here-1").unlink()
            cluster.actors[2 * attempt + 1].lose()

    thread = threading.Thread(target=lose)
    thread.start()
    code, said = on_ray.run_on_ray(cluster, job(script, 2, 1), {"CPU": 1})  # type: ignore[arg-type]
    thread.join()
    assert code == (1 if lost else 7)
    assert_mentions(str(said), "process 1", "Actor 5 left" if lost else "7", "all 1 restarts")
    assert [actor.bundle for actor in cluster.actors] == [0, 1, 0, 1]
    assert "restart 1 of 1" in capfd.readouterr().err
