"""`replicax.train` without what only POSIX has, as on Windows."""

import subprocess
import sys
from pathlib import Path

from support.tiers import EXHAUSTIVE

import replicax.train

MODULES = ("fcntl", "grp", "pwd", "resource", "termios")
NAMES = (
    *("fork", "getuid", "mkfifo", "pread", "register_at_fork", "sched_getaffinity", "uname"),
    *("O_CLOEXEC", "O_DIRECTORY", "O_NOFOLLOW", "O_NONBLOCK"),
)
# Other modules need these imports here, but not on Windows.
WITHOUT = f"""
import importlib, os, pathlib, pkgutil, shutil, sys
import jax, numpy, optax, orbax.checkpoint, etils.epath
for name in {MODULES}:
    sys.modules[name] = None
for name in {NAMES}:
    delattr(os, name)
# As the standard library has it there.
shutil._use_fd_functions, os.process_cpu_count = False, os.cpu_count
"""
ALL = """
import replicax.train
for module in pkgutil.walk_packages(replicax.train.__path__, "replicax.train."):
    importlib.import_module(module.name)
    print(module.name)
"""
RUN = """
import jax.numpy as jnp
from replicax.core.ground.job import Alone
from replicax.core.step.update import TrainState
from replicax.train.checkpoints.arrays import array_entries, read
from replicax.train.checkpoints.manifest import Position
from replicax.train.checkpoints.saver import Saver
from replicax.train.checkpoints.store import Store
from replicax.train.files.lease import take_lease
store = Store(pathlib.Path(sys.argv[1]).resolve() / "checkpoints", 3, None)
state = TrainState(jnp.int32(3), {"w": jnp.full(2, 1.5)}, (), {}, jnp.uint32(0))
with take_lease(pathlib.Path(sys.argv[1])) as lease:
    print(lease.token)
    saver = Saver(store, lease.token, lease.check, Alone(), 0, {})
    saver.save(state, Position(3, 0, 0, 0, 0, 0, 0, 0), {})
    assert saver.wait(), saver.poll()
path, manifest = store.newest_good(array_entries(state), print)
like = jax.tree.map(
    lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), state
)
print(manifest.position.step, str(read(like, path).params["w"].tolist()).replace(" ", ""))
"""


def said(program: str, *arguments: str) -> list[str]:
    command = [sys.executable, "-c", WITHOUT + program, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()


def test_every_module_of_train_is_imported() -> None:
    folder = Path(replicax.train.__file__).parent
    files = {path for path in folder.rglob("*.py") if path.name != "__init__.py"}
    assert {path.stem for path in files} <= {name.rpartition(".")[2] for name in said(ALL)}


@EXHAUSTIVE
def test_a_lease_is_given_back_and_a_checkpoint_restored(tmp_path: Path) -> None:
    for start in ("1", "2"):
        assert said(RUN, str(tmp_path)) == [start, "3", "[1.5,1.5]"]
