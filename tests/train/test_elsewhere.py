"""`replicax.train` on a system without what only POSIX has, such as Windows."""

import subprocess
import sys
from pathlib import Path

import replicax.train

MODULES = ("fcntl", "grp", "pwd", "resource", "termios")
NAMES = (
    *("fork", "getuid", "mkfifo", "pread", "register_at_fork", "sched_getaffinity", "uname"),
    *("O_CLOEXEC", "O_DIRECTORY", "O_NOFOLLOW", "O_NONBLOCK"),
)
# Others may need them to be imported here, as they would not elsewhere.
WITHOUT = f"""
import importlib, os, pathlib, pkgutil, sys
import jax, numpy, optax, orbax.checkpoint, etils.epath
for name in {MODULES}:
    sys.modules[name] = None
for name in {NAMES}:
    delattr(os, name)
"""
ALL = """
import replicax.train
for module in pkgutil.walk_packages(replicax.train.__path__, "replicax.train."):
    importlib.import_module(module.name)
    print(module.name)
"""
TAKEN = """
from replicax.train.lease import take_lease
with take_lease(pathlib.Path(sys.argv[1])) as lease:
    lease.check()
    print(lease.token)
"""


def said(program: str, *arguments: str) -> list[str]:
    command = [sys.executable, "-c", WITHOUT + program, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()


def test_every_module_of_train_is_imported() -> None:
    folder = Path(replicax.train.__file__).parent
    files = {path for path in folder.rglob("*.py") if path.name != "__init__.py"}
    assert {path.stem for path in files} <= {name.rpartition(".")[2] for name in said(ALL)}


def test_a_lease_is_taken_and_given_back(tmp_path: Path) -> None:
    assert said(TAKEN, str(tmp_path)) == ["1"]
    assert said(TAKEN, str(tmp_path)) == ["2"]
