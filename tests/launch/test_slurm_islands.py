"""The batch script of islands, whose array tasks bash runs with a fake srun and scontrol."""

import os
import shutil
import stat
import subprocess
from pathlib import Path
from typing import Any

import pytest

from replicax.launch.job_spec import JobSpec
from replicax.launch.scripts import SlurmOptions, slurm_script

BASH = shutil.which("bash") or "/bin/bash"
SRUN = """#!/bin/sh
echo "$REPLICAX_ISLAND $REPLICAX_ISLANDS $REPLICAX_JOB_ID ${REPLICAX_SECRET-none}" >> srun.log
echo "$(cat "$REPLICAX_SECRET_FILE")" >> secrets
echo "$@" >> arguments
number=$(grep -c "^$REPLICAX_ISLAND " srun.log)
exit $(echo $CODES | cut -d' ' -f$number)
"""
SCONTROL = """#!/bin/sh
if [ "$1" = show ]; then echo "$3"; else echo "$@" >> scontrol.log; fi
"""


def _job(**changes: Any) -> JobSpec:
    fields: dict[str, Any] = {"command": ("replicax", "train", "mlp"), "processes": 4}
    return JobSpec(**{**fields, "name": "run-7", "islands": 2, "restarts": 2, **changes})


def _start(folder: Path, script: str, island: int, codes: str, **more: str) -> Any:
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL), ("job.sh", script)):
        path = folder / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
    (folder / "bin" / "sleep").write_text("#!/bin/sh\nexec /bin/sleep 0.05\n")
    (folder / "bin" / "sleep").chmod(0o755)
    env = {
        "PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "SLURM_ARRAY_TASK_ID": str(island),
        "SLURM_ARRAY_JOB_ID": "12",
        "SLURM_JOB_ID": str(13 + island),
        "SLURM_JOB_NODELIST": f"node{island}",
        "CODES": codes,
        **more,
    }
    command = [BASH, str(folder / "bin" / "job.sh")]
    return subprocess.Popen(command, cwd=folder, env=env, stderr=subprocess.PIPE, text=True)


def _run(folder: Path, codes: list[str], **more: Any) -> tuple[list[int], list[str]]:
    """Exit codes of the tasks, and the lines of the calls of srun."""
    script = slurm_script(_job(**more.pop("job", {})), SlurmOptions())
    tasks = [_start(folder, script, island, each, **more) for island, each in enumerate(codes)]
    for task in tasks:
        task.communicate(timeout=30)
    log = folder / "srun.log"
    return [task.returncode for task in tasks], log.read_text().splitlines() if log.exists() else []


def test_what_slurm_is_asked_for() -> None:
    script = slurm_script(_job(islands=3), SlurmOptions(nodes=2, gpus_per_process=1, time="60"))
    assert subprocess.run([BASH, "-n"], input=script, text=True).returncode == 0
    lines = [line for line in script.splitlines() if line.startswith("#SBATCH ")]
    asked = dict(line.removeprefix("#SBATCH --").partition("=")[::2] for line in lines)
    assert asked == {
        "job-name": "run-7",
        "array": "0-2",
        "nodes": "2",
        "ntasks-per-node": "2",
        "gpus-per-node": "2",
        "time": "60",
        "output": "slurm-%A_%a.out",
        "signal": "TERM@120",
        "requeue": "",
        "open-mode": "append",
    }
    assert max(map(len, script.splitlines())) <= 80


def test_islands_agree_on_addresses_and_on_a_secret_in_a_private_file(tmp_path: Path) -> None:
    codes, calls = _run(tmp_path, ["0", "0"])
    assert codes == [0, 0]
    addresses = "node0:21572,node1:21573"  # 20000 + 12 * 131
    assert sorted(calls) == [f"0 {addresses} 12 none", f"1 {addresses} 12 none"]
    (secret,) = set((tmp_path / "secrets").read_text().split())
    assert len(bytes.fromhex(secret)) == 32
    folder = tmp_path / "islands-12"
    assert stat.S_IMODE((folder / "secret").stat().st_mode) == 0o600
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    names = {path.name for path in folder.iterdir()}
    assert names == {"secret", "done", "island-0", "island-1"}
    assert secret not in slurm_script(_job(), SlurmOptions())


def test_one_that_moved_to_another_host_says_where_it_is(tmp_path: Path) -> None:
    assert _run(tmp_path, ["75", "75"])[0] == [75, 75]
    codes, calls = _run(tmp_path, ["9 9 0"], SLURM_JOB_NODELIST="node7", SLURM_RESTART_COUNT="1")
    assert codes == [0]
    assert calls[-1] == "0 node7:21572,node1:21573 12 none"


@pytest.mark.parametrize(
    ("codes", "restart", "code", "calls", "requeued"),
    [
        ("0", 0, 0, 1, False),
        ("1 137 0", 0, 0, 3, False),
        ("1 1 3", 0, 3, 3, False),
        ("2", 0, 2, 1, False),
        ("75", 0, 75, 1, True),
        ("75", 2, 75, 1, False),
    ],
    ids=["done", "third", "never", "wrong flag", "saved", "saved at once too often"],
)
def test_restarts(
    codes: str, restart: int, code: int, calls: int, requeued: bool, tmp_path: Path
) -> None:
    count = {"SLURM_RESTART_COUNT": str(restart)} if restart else {}
    ended, made = _run(tmp_path, [codes], job={"islands": 1}, **count)
    assert (ended, len(made)) == ([code], calls)
    assert (tmp_path / "scontrol.log").exists() == requeued
    if requeued:
        assert (tmp_path / "scontrol.log").read_text() == "requeue 12_0\n"


def test_nothing_is_started_again_once_one_is_done(tmp_path: Path) -> None:
    assert _run(tmp_path, ["0", "0"])[0] == [0, 0]
    codes, calls = _run(tmp_path, ["7"], SLURM_RESTART_COUNT="1")
    assert (codes, len(calls)) == ([0], 2)


def test_the_command_arrives_as_it_was(tmp_path: Path) -> None:
    job = {"islands": 1, "command": ("a  b", "$HOME", "it's"), "devices_per_process": 2}
    _run(tmp_path, ["0"], job=job)
    flags = "--kill-on-bad-exit=0 --wait=60 --label"
    assert (tmp_path / "arguments").read_text() == f"{flags} a  b $HOME it's\n"
    assert "\nexport JAX_NUM_CPU_DEVICES=2\n" in slurm_script(_job(**job), SlurmOptions())
