"""Slurm on this host: new munged, slurmctld and slurmd in a new folder."""

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

START_SECONDS = 120
STOP_SECONDS = 5

CONFIG = """\
ClusterName=replicax
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmdPort={node_port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket,cred_expire=5
StateSaveLocation={folder}/controller
SlurmdSpoolDir={folder}/node
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
PlugStackConfig={folder}/plugstack.conf
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=2
NodeName={host} NodeAddr=127.0.0.1 CPUs=8 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def missing_slurm() -> str | None:
    """Return why Slurm cannot run here."""
    programs = ["munged", "slurmctld", "slurmd", "srun", "sbatch", "sinfo"]
    missing = [name for name in programs if _program(name) is None]
    if missing:
        return f"{', '.join(missing)} not installed (Debian: apt-get install slurm-wlm munge)"
    if os.geteuid() != 0:
        return "Slurm's daemons run only as root"
    return None


@contextlib.contextmanager
def slurm(folder: Path) -> Iterator[dict[str, str]]:
    """Start a cluster of one node with eight CPUs; yields the variables for srun and sbatch."""
    host = socket.gethostname().partition(".")[0]
    for name in ("munge", "controller", "node"):
        (folder / name).mkdir(mode=0o700)
    _write_private(folder / "munge/key", secrets.token_bytes(128))
    controller_port, node_port = _free_ports(2)
    (folder / "plugstack.conf").touch()
    config = folder / "slurm.conf"
    config.write_text(
        CONFIG.format(
            host=host, folder=folder, controller_port=controller_port, node_port=node_port
        )
    )
    env = {"SLURM_CONF": str(config), "PATH": _path()}
    with contextlib.ExitStack() as daemons:
        munge = [f"--{name.replace('_', '-')}-file={folder}/munge/{name}" for name in MUNGE_FILES]
        # --force: the folder belongs to root, the only user.
        command = ["munged", "--foreground", "--force", f"--socket={folder}/munge/socket", *munge]
        daemons.enter_context(_daemon(command, folder, env))
        _wait_until(lambda: (folder / "munge/socket").exists(), folder)
        for name in ("slurmctld", "slurmd"):
            daemons.enter_context(_daemon([name, "-D", "-f", str(config)], folder, env))
        _wait_until(lambda: _is_idle(env), folder)
        yield env
        _cancel_all(env)


MUNGE_FILES = ("key", "pid", "log", "seed")


@contextlib.contextmanager
def _daemon(command: list[str], folder: Path, env: dict[str, str]) -> Iterator[None]:
    program = _program(command[0])
    assert program
    with (folder / f"{command[0]}.out").open("wb") as out:
        daemon = subprocess.Popen(
            [program, *command[1:]],
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
    try:
        yield
    finally:
        daemon.terminate()
        try:
            daemon.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            daemon.kill()
            daemon.wait()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(daemon.pid, signal.SIGKILL)


def _is_idle(env: dict[str, str]) -> bool:
    command = ["sinfo", "--noheader", "--format=%T"]
    found = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    return found.stdout.strip() == "idle"


def _cancel_all(env: dict[str, str]) -> None:
    subprocess.run(["scancel", "--user=root"], env=env, capture_output=True, check=False)


def _wait_until(ready: object, folder: Path) -> None:
    assert callable(ready)
    deadline = time.monotonic() + START_SECONDS
    while not ready():
        if time.monotonic() > deadline:
            said = "\n".join(path.read_text() for path in sorted(folder.glob("*.out")))
            raise TimeoutError(f"Slurm did not start in {START_SECONDS} s:\n{said}")
        time.sleep(0.05)


def _program(name: str) -> str | None:
    return shutil.which(name, path=_path())


def _path() -> str:
    """Daemons are in sbin, which a user's PATH may lack."""
    return os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as open_sockets:
        listeners = [open_sockets.enter_context(socket.socket()) for _ in range(count)]
        for listener in listeners:
            listener.bind(("127.0.0.1", 0))
        return [listener.getsockname()[1] for listener in listeners]


def _write_private(path: Path, data: bytes) -> None:
    path.touch(mode=0o600)
    path.write_bytes(data)
