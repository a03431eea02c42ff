"""Decisions about a job on Ray, without a cluster; tests/engines runs one."""

import pickle
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from replicax.errors import ClusterError, ConfigError
from replicax.launch import on_ray
from replicax.launch.cause import Ended, FailureReport
from replicax.launch.job_spec import JobSpec
from replicax.launch.on_ray import ProcessError, RayOptions, launch_on_ray
from replicax.launch.process import free_port

JOB = JobSpec(("true",), 2)


def _error(process: int, status: int, report: FailureReport | None) -> ProcessError:
    ended = Ended(status, 10.0, False, report, (), Path("log"))
    return ProcessError(f"process {process} ended with {status}", ended)


def test_cores_are_not_pinned_on_ray() -> None:
    with pytest.raises(ConfigError, match=r"--pin with --on ray; .*--cpus-per-process"):
        launch_on_ray(JobSpec(("true",), 2, pin=True), RayOptions())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (RayOptions(gpus_per_process=-1), "--gpus-per-process -1; .* at least 0"),
        (RayOptions(cpus_per_process=0), "--cpus-per-process 0; .* at least 1"),
    ],
)
def test_numbers_that_cannot_be_meant(options: RayOptions, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        launch_on_ray(JOB, options)


def test_an_address_where_nothing_listens_is_named() -> None:
    address = f"127.0.0.1:{free_port()}"
    with pytest.raises(ClusterError, match=f"RAY_ADDRESS={address} .*be reached .*ray start"):
        on_ray._reach(address, "RAY_ADDRESS")


def test_an_address_without_a_port_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--address=here; .*host:port"):
        on_ray._reach("here", "--address")


def test_the_first_failure_is_the_one_that_is_blamed() -> None:
    own = FailureReport(5.0, "ValueError: a bad value", 3, ())
    other = FailureReport(5.1, "process 1 failed", 3, (1,))
    code, said = on_ray._failed(JOB, {0: _error(0, 1, other), 1: _error(1, 4, own)})
    assert (code, said) == (4, "process 1 failed first: ValueError: a bad value")


def test_a_process_that_is_lost_with_its_worker_is_named_by_the_others() -> None:
    blaming = FailureReport(5.1, "process 1 is lost", 3, (1,))
    code, said = on_ray._failed(JOB, {0: _error(0, 1, blaming), 1: RuntimeError("actor died")})
    assert code == 137
    assert re.match(r"process 1 failed first: killed\b.*SIGKILL", said)


def test_workers_that_are_all_lost_say_what_ray_said() -> None:
    text = "the actor\n died"
    code, said = on_ray._failed(JOB, {1: RuntimeError(text)})
    assert (code, said) == (1, f"process 1: {' '.join(text.split())}")


class FakeRay(SimpleNamespace):
    """A fake Ray in this process: a worker is a call."""

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **named: named

    def DataParallelTrainer(self, run: Any, *, train_loop_config: Any, **_: Any) -> Any:  # noqa: N802
        def fit() -> Any:
            return SimpleNamespace(return_value=run(train_loop_config))

        return SimpleNamespace(fit=fit)

    def get_context(self) -> Any:
        return SimpleNamespace(get_world_rank=lambda: 0)

    def get_node_ip_address(self) -> str:
        return "127.0.0.1"

    def broadcast_from_rank_zero(self, value: Any) -> Any:
        return value


def test_a_worker_runs_the_command_as_its_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It runs in the launcher's folder, with its variables of JAX and its place in the job."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("REPLICAX_SECRET", "of the launcher")
    monkeypatch.setattr(on_ray, "require", lambda *_: FakeRay())
    forwarded = []
    run = on_ray.run_process

    def watched(config: Any) -> int:
        forwarded.append(config["env"])
        return run(config)

    monkeypatch.setattr(on_ray, "run_process", watched)
    names = "REPLICAX_PROCESS_ID", "REPLICAX_PROCESSES", "JAX_NUM_CPU_DEVICES", "NCCL_DEBUG"
    script = f"import os; open('told', 'w').write(' '.join(map(os.environ.get, {names})))"
    script += "; open('told', 'a').write(f\" {len(os.environ['REPLICAX_SECRET'])}\")"
    job = JobSpec((sys.executable, "-S", "-c", script), 1, devices_per_process=3)
    train: Any = SimpleNamespace(
        **dict.fromkeys(("ScalingConfig", "RunConfig", "FailureConfig", "LoggingConfig"), dict),
        WorkerGroupError=ZeroDivisionError,
        TrainingFailedError=ZeroDivisionError,
    )
    assert on_ray._fit(train, job, {"CPU": 1}, str(tmp_path)) == (0, None)
    assert (tmp_path / "told").read_text().split() == ["0", "1", "3", "INFO", "43"]
    assert forwarded[0]["NCCL_DEBUG"] == "INFO"
    assert not {"HOME", "REPLICAX_SECRET"} & forwarded[0].keys()
    with pytest.raises(ProcessError, match="process 0 ended with 7"):
        run({"job": JobSpec(("sh", "-c", "exit 7"), 1), "env": {}, "folder": str(tmp_path)})


def test_an_error_keeps_what_it_knows_on_its_way_to_the_launcher() -> None:
    error = pickle.loads(pickle.dumps(_error(1, 4, None)))
    assert (str(error), error.ended.status) == ("process 1 ended with 4", 4)
