"""The batch script, run by bash with a fake srun."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from replicax.errors import ConfigError
from replicax.launch.job_spec import JobSpec
from replicax.launch.scripts import SlurmOptions, slurm_script

ODD = (
    "python",
    "a b",
    "it's",
    'say "x"',
    "$HOME $(id) `id`",
    "line\nbreak",
    "back\\",
    "#",
    "",
    "é",
)
BASH = shutil.which("bash") or "/bin/bash"


def _job(**changes: Any) -> JobSpec:
    fields: dict[str, Any] = {"command": ("replicax", "train", "mlp"), "processes": 8}
    return JobSpec(**{**fields, "name": "run-7", **changes})


def _directives(script: str) -> dict[str, str]:
    lines = [line for line in script.splitlines() if line.startswith("#SBATCH ")]
    pairs = (line.removeprefix("#SBATCH --").partition("=") for line in lines)
    return {name: value for name, _, value in pairs}


def _run(
    script: str, folder: Path, codes: list[int], restart: int = 0
) -> tuple[int, str, list[Any]]:
    """Exit code and messages of the script, and the arguments of each call of srun and scontrol."""
    log = folder / "log"
    for name in ("srun", "scontrol"):
        fake = folder / name
        fake.write_text(
            f"#!{sys.executable}\n"
            "import json, os, sys\n"
            f"log = open({str(log)!r}, 'a+')\n"
            "log.seek(0); n = sum('srun' in line[:9] for line in log)\n"
            "log.write(json.dumps([os.path.basename(sys.argv[0]), *sys.argv[1:]]) + '\\n')\n"
            f"sys.exit({codes!r}[n] if 'srun' in sys.argv[0] else 0)\n"
        )
        fake.chmod(0o755)
    path = folder / "job.sh"
    path.write_text(script)
    env = {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}", "SLURM_JOB_ID": "12"}
    if restart:
        env["SLURM_RESTART_COUNT"] = str(restart)
    done = subprocess.run([BASH, path], env=env, timeout=30, stderr=subprocess.PIPE, text=True)
    return done.returncode, done.stderr, [json.loads(line) for line in log.read_text().splitlines()]


def test_the_command_arrives_as_it_was(tmp_path: Path) -> None:
    for restarts in (0, 2):
        folder = tmp_path / str(restarts)
        folder.mkdir()
        job = _job(command=ODD, restarts=restarts)
        code, said, calls = _run(slurm_script(job, SlurmOptions()), folder, [0])
        assert (code, said) == (0, "")
        assert calls == [["srun", "--kill-on-bad-exit=0", "--wait=60", "--label", *ODD]]


def test_each_start_draws_a_secret_that_srun_passes_on(tmp_path: Path) -> None:
    drawn = set()
    for number in range(2):
        (folder := tmp_path / str(number)).mkdir()
        script = slurm_script(_job(), SlurmOptions())
        told = script.replace(
            "srun --kill", f'echo "$REPLICAX_SECRET" > {folder}/told; srun --kill'
        )
        _, said, calls = _run(told, folder, [0])
        secret = (folder / "told").read_text().strip()
        assert "export REPLICAX_SECRET\n" in script
        assert len(bytes.fromhex(secret)) == 32
        assert secret not in said + str(calls)
        drawn.add(secret)
    assert len(drawn) == 2


def test_what_slurm_is_asked_for() -> None:
    options = SlurmOptions(
        nodes=2,
        gpus_per_process=2,
        cpus_per_process=6,
        time="1-12",
        partition="gpu",
        account="lab",
        output="logs/%x-%j.out",
    )
    script = slurm_script(_job(), options)
    assert script.startswith("#!/bin/bash\n")
    assert _directives(script) == {
        "job-name": "run-7",
        "partition": "gpu",
        "account": "lab",
        "nodes": "2",
        "ntasks-per-node": "4",
        "gpus-per-node": "8",
        "cpus-per-task": "6",
        "time": "1-12",
        "output": "logs/%x-%j.out",
        "signal": "TERM@120",
    }
    srun = "srun --kill-on-bad-exit=0 --wait=60 --label --cpus-per-task=6"
    assert f"{srun} \\\n    replicax train" in script


def test_what_is_not_given_is_not_asked_for() -> None:
    assert _directives(slurm_script(_job(), SlurmOptions())) == {
        "job-name": "run-7",
        "nodes": "1",
        "ntasks-per-node": "8",
        "output": "slurm-%j.out",
    }


@pytest.mark.parametrize(
    ("codes", "restart", "code", "calls"),
    [
        ([0], 0, 0, ["srun"]),
        ([1, 0], 0, 0, ["srun", "srun"]),
        ([1, 1, 137], 0, 137, ["srun", "srun", "srun"]),
        ([2], 0, 2, ["srun"]),
        ([75], 0, 75, ["srun", "scontrol"]),
        ([75], 2, 75, ["srun"]),
    ],
    ids=["done", "second", "never", "wrong flag", "saved", "saved too often"],
)
def test_restarts(
    codes: list[int], restart: int, code: int, calls: list[str], tmp_path: Path
) -> None:
    script = slurm_script(_job(restarts=2), SlurmOptions())
    assert "requeue" in _directives(script)
    ended, said, made = _run(script, tmp_path, codes, restart)
    assert (ended, [call[0] for call in made]) == (code, calls)
    failures = [code for code in codes if code not in (0, 2, 75)]
    assert said.splitlines() == [
        f"attempt {i} of 3: exit code {code}" for i, code in enumerate(failures, 1)
    ]
    if "scontrol" in calls:
        assert made[-1] == ["scontrol", "requeue", "12"]


@pytest.mark.parametrize(
    ("options", "spread"),
    [
        (SlurmOptions(processes_per_node=4), ("2", "4")),
        (SlurmOptions(nodes=8, processes_per_node=1), ("8", "1")),
    ],
)
def test_processes_over_nodes(options: SlurmOptions, spread: tuple[str, str]) -> None:
    asked = _directives(slurm_script(_job(), options))
    assert (asked["nodes"], asked["ntasks-per-node"]) == spread


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (SlurmOptions(nodes=3), "8 processes on 3 nodes with 2 on each.*use 6 processes"),
        (SlurmOptions(nodes=9), "8 processes on 9 nodes with 1 on each"),
        (SlurmOptions(processes_per_node=3), "8 processes on 2 nodes with 3 on each"),
        (SlurmOptions(nodes=2, processes_per_node=2), "8 processes on 2 nodes with 2 on each"),
        (SlurmOptions(nodes=0), "nodes=0; .* at least 1"),
        (SlurmOptions(gpus_per_process=-1), "gpus_per_process=-1; .* at least 0"),
        (SlurmOptions(cpus_per_process=0), "cpus_per_process=0; .* at least 1"),
        (SlurmOptions(partition="a b"), "partition='a b' is not allowed in an #SBATCH line"),
        (SlurmOptions(output="x\n#SBATCH --exclusive"), "output=.*is not allowed"),
        (SlurmOptions(time=""), "time='' "),
        (SlurmOptions(time="abc"), "time='abc' "),
        (SlurmOptions(time="1:2:3:4"), "time='1:2:3:4' "),
        (SlurmOptions(time="1-2-3"), "time='1-2-3' "),
    ],
)
def test_bad_options(options: SlurmOptions, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        slurm_script(_job(), options)


def test_lines_fit_a_terminal() -> None:
    script = slurm_script(_job(restarts=2), SlurmOptions(time="1:0:0", gpus_per_process=1))
    assert max(map(len, script.splitlines())) <= 80
