"""The same training, unchanged, under real engines on this host, each started by its test."""

import json
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from engines.commands import HERE, PYTHON, REPLICAX, SECONDS, run, said
from engines.leftovers import leftovers
from engines.openmpi import missing_openmpi, mpirun
from engines.ray import missing_ray, ray_cluster
from engines.slurm import missing_slurm, slurm
from support.tiers import EXHAUSTIVE

from replicax.launch.job_spec import JobSpec
from replicax.launch.scripts import SlurmOptions, slurm_script

SCRIPT = [PYTHON, str(HERE / "train_job.py")]
FLAGS = ["--devices", "2", "--steps", "5", "--run", "tiny"]
TRAIN = [REPLICAX, "train", f"{HERE / 'tiny_recipe.py'}:Tiny", *FLAGS]
ONE_DEVICE = {"JAX_NUM_CPU_DEVICES": "1"}
ABSOLUTE_DIFFERENCE = 1e-6

pytestmark = EXHAUSTIVE
needs_mpirun = pytest.mark.skipif(missing_openmpi() is not None, reason=str(missing_openmpi()))
needs_slurm = pytest.mark.skipif(missing_slurm() is not None, reason=str(missing_slurm()))
needs_ray = pytest.mark.skipif(missing_ray() is not None, reason=str(missing_ray()))


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> dict[str, np.ndarray]:
    """Weights of a run in one process with two devices."""
    folder = tmp_path_factory.mktemp("one")
    done = run([*SCRIPT, "weights.npz"], folder, {"JAX_NUM_CPU_DEVICES": "2"})
    assert done.returncode == 0, said(done)
    return _load(folder)


@pytest.fixture(scope="module")
def recipe_weights(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Weights of `replicax train` in one process with two devices."""
    done = run(TRAIN, tmp_path_factory.mktemp("one"))
    assert done.returncode == 0, said(done)
    return _printed(done)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The variables of a Slurm cluster of one node."""
    folder = tmp_path_factory.mktemp("slurm")
    with slurm(folder) as env:
        yield env
    assert leftovers(folder) == []


@pytest.fixture(scope="module")
def ray_address() -> Iterator[str]:
    """Where a Ray cluster with three CPUs is."""
    with ray_cluster(cpus=3) as (address, folder):
        yield address
    assert leftovers(folder) == []


def test_processes_under_launch_train_the_same_weights(
    weights: dict[str, np.ndarray], tmp_path: Path
) -> None:
    launch = [REPLICAX, "launch", "--processes", "2", "--devices-per-process", "1", "--"]
    _check(run([*launch, *SCRIPT, "weights.npz"], tmp_path), tmp_path, weights)


@needs_mpirun
def test_processes_under_mpirun_train_the_same_weights(
    weights: dict[str, np.ndarray], tmp_path: Path
) -> None:
    done = run([*mpirun(2), *SCRIPT, "weights.npz"], tmp_path, ONE_DEVICE)
    assert "process 0 of 2 (OMPI_COMM_WORLD_RANK" in done.stderr
    _check(done, tmp_path, weights)


@needs_slurm
def test_processes_under_srun_train_the_same_weights(
    cluster: dict[str, str], weights: dict[str, np.ndarray], tmp_path: Path
) -> None:
    done = run(["srun", "-n", "2", *SCRIPT, "weights.npz"], tmp_path, {**ONE_DEVICE, **cluster})
    assert "process 0 of 2 (SLURM_PROCID" in done.stderr, said(done)
    _check(done, tmp_path, weights)


@needs_ray
def test_processes_under_ray_train_the_same_weights(
    ray_address: str, weights: dict[str, np.ndarray], tmp_path: Path
) -> None:
    _check(_on_ray(ray_address, [*SCRIPT, "weights.npz"], tmp_path), tmp_path, weights)


@needs_mpirun
def test_replicax_train_runs_unchanged_under_mpirun(
    recipe_weights: list[float], tmp_path: Path
) -> None:
    _check_printed(run([*mpirun(2), *TRAIN], tmp_path), recipe_weights)


@needs_slurm
def test_replicax_train_runs_unchanged_under_srun(
    cluster: dict[str, str], recipe_weights: list[float], tmp_path: Path
) -> None:
    _check_printed(run(["srun", "-n", "2", *TRAIN], tmp_path, cluster), recipe_weights)


@needs_slurm
def test_a_batch_script_is_one_that_slurm_takes_and_runs(
    cluster: dict[str, str], weights: dict[str, np.ndarray], tmp_path: Path
) -> None:
    job = JobSpec((*SCRIPT, "weights.npz"), processes=2, devices_per_process=1, name="tiny")
    script = tmp_path / "job.sh"
    script.write_text(slurm_script(job, SlurmOptions(nodes=1, time="5")))
    tested = run(["sbatch", "--test-only", "job.sh"], tmp_path, cluster)
    assert tested.returncode == 0, said(tested)
    assert "to start" in tested.stderr  # where, and on how many processors
    _check(run(["sbatch", "--wait", "job.sh"], tmp_path, cluster), tmp_path, weights)


@needs_slurm
def test_an_island_is_requeued_alone(cluster: dict[str, str], tmp_path: Path) -> None:
    """It fails first, then stops early and is requeued, while the other runs on."""
    script = (
        "import os, pathlib, sys, time\n"
        "island, process = os.environ['REPLICAX_ISLAND'], os.environ['SLURM_PROCID']\n"
        "with open(f'starts-{island}-{process}', 'a') as file:\n"
        "    print(os.environ['REPLICAX_ISLANDS'], os.environ['REPLICAX_JOB_ID'], file=file)\n"
        "starts = len(pathlib.Path(f'starts-{island}-{process}').read_text().splitlines())\n"
        "if island == '1' and starts < 3: sys.exit({1: 5, 2: 75}[starts])\n"
        "other = pathlib.Path('starts-1-0')\n"
        "while not (other.exists() and other.read_text().count('\\n') == 3): time.sleep(0.1)\n"
    )
    job = JobSpec((PYTHON, "-S", "-c", script), processes=2, restarts=3, islands=2)
    (tmp_path / "job.sh").write_text(slurm_script(job, SlurmOptions(time="5")))
    done = run(["sbatch", "--wait", "job.sh"], tmp_path, cluster)
    shown = "".join(path.read_text() for path in tmp_path.glob("slurm-*.out"))
    assert done.returncode == 0, said(done) + shown
    starts = {
        path.name.removeprefix("starts-"): path.read_text().splitlines()
        for path in tmp_path.glob("starts-*")
    }
    counts = {name: len(lines) for name, lines in starts.items()}
    assert counts == {"0-0": 1, "0-1": 1, "1-0": 3, "1-1": 3}, shown
    assert len({line for lines in starts.values() for line in lines}) == 1


@needs_slurm
def test_a_process_that_fails_ends_the_step_with_its_cause(
    cluster: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "fails.py").write_text(
        "import replicax as rx\n"
        "if rx.initialize().process == 1:\n"
        "    raise ValueError('a bad value')\n"
        "import time; time.sleep(60)\n"
    )
    done = run(["srun", "-n", "2", PYTHON, "fails.py"], tmp_path, cluster)
    assert done.returncode != 0
    assert "process 0 stops: process 1" in done.stderr, said(done)
    assert "ValueError: a bad value" in done.stderr


@needs_ray
def test_ray_starts_all_again_after_a_failure(ray_address: str, tmp_path: Path) -> None:
    """Process 1 fails the first time only."""
    script = (
        "import os, pathlib, sys\n"
        "if os.environ['REPLICAX_PROCESS_ID'] == '1':\n"
        "    again = pathlib.Path('again')\n"
        "    if not again.exists():\n"
        "        again.touch()\n"
        "        raise ValueError('a bad value')\n"
        "else:\n"
        "    pathlib.Path(os.environ['REPLICAX_JOB_ID']).touch()\n"
    )
    done = _on_ray(ray_address, [PYTHON, "-c", script], tmp_path, "--restarts", "1")
    assert done.returncode == 0, said(done)
    assert "[1] ValueError: a bad value" in done.stdout + done.stderr
    jobs = {path.name for path in tmp_path.iterdir()} - {"again"}
    assert len(jobs) == 2, jobs  # a restarted job has a new id


@needs_ray
def test_the_first_failure_under_ray_is_named(ray_address: str, tmp_path: Path) -> None:
    script = (
        "import os, sys, time\n"
        "if os.environ['REPLICAX_PROCESS_ID'] == '1': sys.exit('a bad value')\n"
        "time.sleep(60)"
    )
    done = _on_ray(ray_address, [PYTHON, "-c", script], tmp_path)
    assert done.returncode == 1, said(done)
    assert "process 1 failed first: exit code 1 (a bad value)" in done.stderr


@needs_ray
@pytest.mark.parametrize("killed", ["process", "worker"])
def test_an_island_on_ray_is_started_again_alone(
    ray_address: str, tmp_path: Path, killed: str
) -> None:
    """Its process is killed, or Ray's worker above it; the bits are those of one process."""
    script = [PYTHON, str(HERE / "island_job.py"), "weights.npz"]
    alone, together = tmp_path / "alone", tmp_path / "together"
    alone.mkdir()
    together.mkdir()
    compiled = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}  # equally, whatever the cluster has
    done = run(script, alone, {**ONE_DEVICE, **compiled})
    assert done.returncode == 0, said(done)
    launch = [REPLICAX, "launch", "--on", "ray", "--islands", "3", "--devices-per-process", "1"]
    env = {"RAY_ADDRESS": ray_address, **compiled}
    done = run([*launch, "--", *script, killed], together, env)
    assert done.returncode == 0, said(done)
    starts = {path.name[-1]: len(path.read_text().split()) for path in together.glob("starts-*")}
    assert starts == {"0": 1, "1": 2, "2": 1}, said(done)
    assert "replicax: island 1 died" in done.stderr, said(done)
    assert (together / "joined").exists(), said(done)
    expected = _load(alone)
    got = _load(together)
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(got[name], value)


@needs_ray
@pytest.mark.parametrize(
    ("flag", "number", "exit_code"),
    [
        ("--processes", signal.SIGINT, 130),
        ("--processes", signal.SIGKILL, -9),
        ("--islands", signal.SIGTERM, 143),
        ("--islands", signal.SIGKILL, -9),
    ],
)
def test_nothing_outlives_a_launcher_on_ray(
    ray_address: str, tmp_path: Path, flag: str, number: int, exit_code: int
) -> None:
    """Processes that the command started end as well."""
    sleep = f"{PYTHON} -S -c 'import time; time.sleep(300)' {tmp_path}"
    command = ["sh", "-c", f"{sleep} & touch ${{REPLICAX_ISLAND:-$REPLICAX_PROCESS_ID}}; wait"]
    launch = [REPLICAX, "launch", "--on", "ray", "--address", ray_address, flag, "2"]
    with (tmp_path / "out").open("wb") as out:
        launcher = subprocess.Popen(
            [*launch, "--", *command],
            cwd=tmp_path,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
        )
    try:
        deadline = time.monotonic() + SECONDS
        while not ((tmp_path / "0").exists() and (tmp_path / "1").exists()):
            assert launcher.poll() is None, (tmp_path / "out").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        launcher.send_signal(number)
        assert launcher.wait(SECONDS) == exit_code
    finally:
        launcher.kill()
        launcher.wait()
    assert leftovers(tmp_path) == []


def _on_ray(
    address: str, command: Sequence[str], folder: Path, *flags: str
) -> subprocess.CompletedProcess[str]:
    launch = [REPLICAX, "launch", "--on", "ray", "--processes", "2", "--devices-per-process", "1"]
    return run([*launch, *flags, "--", *command], folder, {"RAY_ADDRESS": address})


def _check(
    done: subprocess.CompletedProcess[str], folder: Path, expected: dict[str, np.ndarray]
) -> None:
    assert done.returncode == 0, said(done)
    got = _load(folder)
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(got[name], value, rtol=0, atol=ABSOLUTE_DIFFERENCE)


def _check_printed(done: subprocess.CompletedProcess[str], expected: list[float]) -> None:
    assert done.returncode == 0, said(done)
    np.testing.assert_allclose(_printed(done), expected, rtol=0, atol=ABSOLUTE_DIFFERENCE)


def _load(folder: Path) -> dict[str, np.ndarray]:
    with np.load(folder / "weights.npz") as saved:
        return dict(saved)


def _printed(done: subprocess.CompletedProcess[str]) -> list[float]:
    """Return the weights, which only process 0 prints."""
    lines = [line for line in done.stdout.splitlines() if line.startswith("weights ")]
    assert len(lines) == 1, said(done)
    numbers: list[float] = json.loads(lines[0].removeprefix("weights "))
    return numbers
